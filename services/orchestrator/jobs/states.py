"""The life of a job: ONE table of legal transitions, used by the code, the error messages and the documents.

queued -> validating -> estimating -> running -> succeeded    (estimating -> succeeded: nothing is to be trained)
                                        |  ^
                                        v  |
                                    pausing -> paused
paused -> running waits in the queue for a slot;
every state before the last may go to failed, and by cancelling to cancelled
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spo.errors import Conflict, IntegrityError
from spo.spec.job_state import JobState

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.VALIDATING, JobState.FAILED, JobState.CANCELLED}),
    JobState.VALIDATING: frozenset({JobState.ESTIMATING, JobState.FAILED, JobState.CANCELLING}),
    JobState.ESTIMATING: frozenset({JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLING}),
    JobState.RUNNING: frozenset({JobState.SUCCEEDED, JobState.PAUSING, JobState.FAILED, JobState.CANCELLING}),
    JobState.PAUSING: frozenset({JobState.PAUSED, JobState.RUNNING, JobState.FAILED, JobState.CANCELLING}),
    JobState.PAUSED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLING}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.FAILED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


def may_become(state: JobState) -> frozenset[JobState]:
    """The states from which this one may be entered."""
    return frozenset(before for before, following in TRANSITIONS.items() if state in following)


@dataclass(frozen=True)
class JobAction:
    """What a person may ask of a job: where each state goes, and the states in which it is already so.

    Out of the states `queues` the move waits for a slot in the queue.
    """

    name: str
    moves: dict[JobState, JobState]
    already: frozenset[JobState]
    queues: frozenset[JobState] = frozenset()


CANCEL = JobAction(
    "cancel",
    {JobState.QUEUED: JobState.CANCELLED} | dict.fromkeys(sorted(may_become(JobState.CANCELLING)), JobState.CANCELLING),
    frozenset({JobState.CANCELLING, JobState.CANCELLED}),
)
PAUSE = JobAction("pause", {JobState.RUNNING: JobState.PAUSING}, frozenset({JobState.PAUSING, JobState.PAUSED}))
RESUME = JobAction(
    "resume",
    {JobState.PAUSING: JobState.RUNNING, JobState.PAUSED: JobState.RUNNING},
    frozenset({JobState.RUNNING}),
    queues=frozenset({JobState.PAUSED}),
)
ACTIONS = (CANCEL, PAUSE, RESUME)


def legal_transitions() -> dict[str, list[str]]:
    """The table as plain words, for documents and OpenAPI."""
    return {state.value: sorted(following) for state, following in TRANSITIONS.items()}


def refuse(action: str, state: JobState) -> Conflict:
    """The error of an action that this state does not allow; names the transitions and actions that are legal."""
    states = ", ".join(sorted(TRANSITIONS[state])) or "none"
    actions = ", ".join(legal.name for legal in ACTIONS if state in legal.moves) or "none"
    return Conflict(
        f"a job that is {state} cannot {action}; legal transitions: {states}; legal actions: {actions}",
        code="illegal_transition",
    )


def fold(transitions: Iterable[Mapping[str, Any]], state: JobState | None = None) -> JobState:
    """The state after transition bodies {"from", "to"} in order, from `state` on; None: from before the first.

    Raises IntegrityError at an illegal or missing one.
    """
    for body in transitions:
        before = JobState(body["from"]) if body["from"] else None
        after = JobState(body["to"])
        legal = after is JobState.QUEUED if state is None else before is state and after in TRANSITIONS[state]
        if not legal:
            raise IntegrityError(f"the events of the job go from {state} by {before} to {after}")
        state = after
    if state is None:
        raise IntegrityError("the job has no events")
    return state
