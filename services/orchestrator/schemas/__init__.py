"""The JSON of the REST API: snake_case, RFC 3339 UTC; fields are only ever added.

The experience store's part is `schemas.experience`, whose names overlap with these.
"""

from services.orchestrator.schemas.jobs import Event, EventPage, Failure, Job, JobPage, JobSummary, Lineage, Progress
from services.orchestrator.schemas.platform import LogLine, LogPage, PoolView, Replica, Replicas, ScaleView, Version
from services.orchestrator.schemas.training import (
    Checkpoint,
    Checkpoints,
    Evaluations,
    MetricSeries,
    WeightVersion,
    WeightVersions,
)
from services.orchestrator.schemas.trajectories import (
    BatchView,
    Calibration,
    CalibrationBin,
    Hop,
    PromptView,
    TokenValues,
    Trajectory,
    TrajectoryDetail,
    TrajectoryPage,
    Verdict,
)

__all__ = [
    "BatchView",
    "Calibration",
    "CalibrationBin",
    "Checkpoint",
    "Checkpoints",
    "Evaluations",
    "Event",
    "EventPage",
    "Failure",
    "Hop",
    "Job",
    "JobPage",
    "JobSummary",
    "Lineage",
    "LogLine",
    "LogPage",
    "MetricSeries",
    "PoolView",
    "Progress",
    "PromptView",
    "Replica",
    "Replicas",
    "ScaleView",
    "TokenValues",
    "Trajectory",
    "TrajectoryDetail",
    "TrajectoryPage",
    "Verdict",
    "Version",
    "WeightVersion",
    "WeightVersions",
]
