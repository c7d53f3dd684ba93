"""What is stored, as the documents that API and pages show; one module per subject."""

from services.orchestrator.http.views.attention import attention
from services.orchestrator.http.views.jobs import evaluation_brief, job, job_summaries, job_summary, spec_warnings
from services.orchestrator.http.views.logs import LogFilter, LogLevel, logs
from services.orchestrator.http.views.platform import platform, replicas, scale
from services.orchestrator.http.views.prompts import prompt, prompts
from services.orchestrator.http.views.training import checkpoints, weight_versions
from services.orchestrator.http.views.trajectories import (
    REPLAY_SECONDS,
    TrajectoryFilter,
    get_trajectory,
    token_values,
    trajectories,
    trajectory_detail,
)

__all__ = [
    "REPLAY_SECONDS",
    "LogFilter",
    "LogLevel",
    "TrajectoryFilter",
    "attention",
    "checkpoints",
    "evaluation_brief",
    "get_trajectory",
    "job",
    "job_summaries",
    "job_summary",
    "logs",
    "platform",
    "prompt",
    "prompts",
    "replicas",
    "scale",
    "spec_warnings",
    "token_values",
    "trajectories",
    "trajectory_detail",
    "weight_versions",
]
