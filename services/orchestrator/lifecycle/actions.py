"""What a person may do to a job: cancel, pause, resume, rename, ask for a checkpoint."""

from __future__ import annotations

from services.orchestrator.jobs.commit import Commit
from services.orchestrator.jobs.record import write_fields
from services.orchestrator.jobs.states import JobAction, refuse
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.queue import JobQueue
from spo.spec.job_state import JobState


class JobActions:
    """Each action is one change of the job, and asking again changes nothing."""

    def __init__(self, jobs: JobStore, queue: JobQueue) -> None:
        self.jobs = jobs
        self.queue = queue

    def act(self, job_id: str, action: JobAction, actor: str = "api") -> JobState:
        """Do what a person asks; returns the state after it. Raises NotFound, Conflict (illegal_transition)."""
        while True:
            state = self.jobs.state(job_id)
            if state in action.already:
                if action.name == "pause":
                    self.queue.withdraw(job_id)
                return state
            if state not in action.moves:
                raise refuse(action.name, state)
            if state in action.queues:
                if self.queue.ask_to_resume(job_id, actor):
                    return state
                continue
            to = action.moves[state]
            if self.jobs.transition(job_id, to, f"{action.name} asked for", expected=(state,), actor=actor):
                return to

    def rename(self, job_id: str, name: str, actor: str = "api") -> None:
        """Give a job another name in lists and on pages; its spec keeps the one it came with. Raises NotFound."""
        if self.jobs.record(job_id).name == name:
            return
        # What people write into requests is in no event.
        commit = Commit(job_id, writes=[write_fields(job_id, name=name)], kind="renamed", actor=actor)
        if not self.jobs.commit(commit).done:
            raise self.jobs.absent(job_id)

    def ask_for_checkpoint(self, job_id: str) -> None:
        """Let the trainer of a running job write a checkpoint now. Raises NotFound, Conflict (illegal_transition)."""
        commit = Commit(job_id, (JobState.RUNNING,), writes=[write_fields(job_id, checkpoint_asked=True)])
        if not self.jobs.commit(commit).done:
            raise refuse("checkpoint", self.jobs.state(job_id))
