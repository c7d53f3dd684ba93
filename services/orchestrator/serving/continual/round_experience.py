"""What a continual job learns from: stored runs, and captured traffic that is stored as it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.serving.capture import CaptureStore
from services.orchestrator.serving.collect import MOST_COLLECTED, CollectTerms, collect
from services.orchestrator.serving.continual.rounds import ContinualJob, Round
from services.orchestrator.serving.served_models import ServedModels
from spo.experience.store import ExperienceStore
from spo.rpc.judge_pools import JudgePools

# Feedback comes later than the traffic that it is about, so all that is kept is looked through each time.
COLLECT_SECONDS = 60.0


@dataclass
class RoundExperience:
    """The stored experience of continual jobs. Used by the loop's thread, and by readers for counts alone."""

    store: ExperienceStore
    jobs: JobStore
    served: ServedModels
    captures: CaptureStore
    judges: JudgePools
    library: TaskLibrary
    _collected_at: dict[str, float] = field(default_factory=dict)

    def collect_traffic(self, job: ContinualJob) -> None:
        """Store what was captured and said of it, at most once a minute; again changes nothing. Raises SpoError."""
        traffic = job.spec.traffic
        if traffic is None or time.monotonic() - self._collected_at.get(job.field, -COLLECT_SECONDS) < COLLECT_SECONDS:
            return
        self._collected_at[job.field] = time.monotonic()
        tasks = self.jobs.spec(self.served.get(job.tenant, job.spec.serves).job_id).tasks
        problems, after_unix_ms = self.library.load(tasks).train, 0
        while True:
            # Other continual jobs do not wait for a judge that is asleep: this wakes it, and comes again.
            terms = CollectTerms(
                traffic.name, job.tenant, tasks.kind, traffic.judge_unscored, after_unix_ms, patience_seconds=0.0
            )
            found = collect(self.captures, self.store, self.judges, problems, terms)
            if found.looked_at < MOST_COLLECTED or found.newest_unix_ms <= after_unix_ms:
                return
            after_unix_ms = found.newest_unix_ms

    def rows(self, job: ContinualJob, rounds: list[Round]) -> dict[str, int]:
        """Rows of each run that it learns from; what the jobs of its own rounds have stored does not count."""
        own = {each.job_id for each in rounds}
        wanted, found = set(job.spec.runs), dict[str, int]()
        for file in self.store.files():
            run = file.origin.run
            if file.origin.tenant == job.tenant and run not in own and (not wanted or run in wanted):
                found[run] = found.get(run, 0) + file.rows
        return found

    def new_rows(self, job: ContinualJob, rounds: list[Round]) -> int:
        """How many of them are new since its newest round began."""
        before = rounds[0].learned_from if rounds else {}
        return sum(max(0, rows - before.get(run, 0)) for run, rows in self.rows(job, rounds).items())
