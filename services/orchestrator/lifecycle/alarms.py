"""What a trainer says of the health of a run: alarms and quarantined batches become events, and may pause the job."""

from __future__ import annotations

import json

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Precondition
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.weights import REFERENCE_VERSION, WeightAnnouncements
from spo.algorithm.collapse_guard import SAMPLER_MISMATCH
from spo.observability.logs import get_logger
from spo.spec.job_state import JobState
from spo.v1.orchestrator_service_pb2 import RenewLeaseRequest, StepReport

log = get_logger("alarms")


class Alarms:
    """Notes each alarm and quarantine once, however often its report arrives."""

    def __init__(self, jobs: JobStore, weights: WeightAnnouncements) -> None:
        self.jobs = jobs
        self.weights = weights

    def note(self, request: RenewLeaseRequest) -> bool:
        """Tell of what the reports of a lease holder hold; True when that paused the job."""
        paused = False
        for report in request.reports:
            if report.quarantine_reason:
                self._quarantined(request, report)
            if report.alarms:
                paused |= self._sound(request, report)
        return paused

    def _quarantined(self, request: RenewLeaseRequest, report: StepReport) -> None:
        body = {
            "step": report.step,
            "reason": report.quarantine_reason,
            "trajectory_ids": list(report.quarantined_ids),
        }
        self._once(request, f"{report.step}:quarantine", "quarantine", body)

    def _sound(self, request: RenewLeaseRequest, report: StepReport) -> bool:
        policy = self.jobs.spec(request.run_id).collapse_guard.policy
        for name, reason in sorted(report.alarms.items()):
            body = {"step": report.step, "alarm": name, "reason": reason, "policy": policy}
            self._once(request, f"{report.step}:{name}", "alarm", body)
        collapses = set(report.alarms) - {SAMPLER_MISMATCH}
        return policy == "pause" and bool(collapses) and self._pause(request, report)

    def _once(self, request: RenewLeaseRequest, what: str, kind: str, body: dict[str, object]) -> None:
        mark = self._mark(request, what)
        self.jobs.once(request.run_id, mark, kind, body, [("HSET", mark.key, mark.field, json.dumps(body))])

    def _mark(self, request: RenewLeaseRequest, what: str) -> Precondition:
        # With the epoch: a trainer that resumed from an earlier step may come to the same alarm again.
        return Precondition(own_keys.job_alarms(request.run_id), f"{request.epoch}:{what}")

    def _pause(self, request: RenewLeaseRequest, report: StepReport) -> bool:
        """Pause at the last good weights: the newest published before the window in which the alarm arose."""
        job_id, mark = request.run_id, self._mark(request, f"{report.step}:pause")
        if self.jobs.state(job_id) is not JobState.RUNNING or self.jobs.client.hexists(mark.key, mark.field):
            return False
        window = self.jobs.spec(job_id).collapse_guard.window
        sound = [known["version"] for known in self.weights.versions(job_id) if known["step"] <= report.step - window]
        good = int(sound[-1]) if sound else REFERENCE_VERSION
        announced = self.weights.announced(job_id)
        if announced is not None and announced.version != good:
            # Before the transition: should this process die in between, it is announced again, and nothing is lost.
            self.weights.announce(job_id, good, "rolled_back", actor="collapse guard")
        reasons = "; ".join(reason for _, reason in sorted(report.alarms.items()))
        reason = f"collapse guard at step {report.step}: {reasons}; inference is at weight version {good}"
        outcome = self.jobs.commit(
            Commit(
                job_id,
                (JobState.RUNNING,),
                JobState.PAUSING,
                guard=mark,
                writes=[("HSET", mark.key, mark.field, good)],
                kind="state",
                body=json.dumps({"reason": reason}),
                actor="collapse guard",
            )
        )
        if outcome.done:
            log.warning("the collapse guard pauses a job", job=job_id, reason=reason)
        return outcome.done
