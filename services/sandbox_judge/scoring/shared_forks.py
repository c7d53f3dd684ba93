"""Groups of one run and one function scored in one fork, since a fork costs as much as many responses of a quick one.

A fork in which anything goes wrong decides about none of its groups: each is then judged alone, so that what spoilt it
is told of the group that did it, and harms no other.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence

from services.sandbox_judge.backends.zygote import Executable
from services.sandbox_judge.executor import ProgramRun, RunEnding, limits_of
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from services.sandbox_judge.scoring.packages import role_of
from services.sandbox_judge.scoring.scores import complete, fork_limits, is_fault, read_line, sent_to
from spo.redis_keys import digest
from spo.v1.verdict_pb2 import TestSet, Verdict

# A fork that has computed, or lived, for so long takes no further group.
SHARED_SECONDS = (0.1, 1.0)
_SHARING = (Role.FUNCTION, Role.REASONING_GYM)

# Responses, what they are scored by, and whether details are wanted.
Group = tuple[Sequence[str], TestSet, bool]


def shared_by(test_set: TestSet, run_id: str) -> str:
    """The same text for what may be scored in one fork: of one run, by one function, within the same limits."""
    role = role_of(test_set)
    if role not in _SHARING or not run_id:
        return ""
    function = test_set.scoring_function
    return digest(run_id, role.value, function.source, function.function, repr(limits_of(test_set)))


def score_groups(worker: SandboxWorker, groups: Sequence[Group]) -> list[list[Verdict] | None]:
    """The verdicts of each group, None for those to be judged alone. Raises JudgeFault when the judge itself failed."""
    role, limits = role_of(groups[0][1]), limits_of(groups[0][1])
    assert role is not None
    decided: list[list[Verdict] | None] = []
    with worker.open(role, Executable(), fork_limits(limits)) as prepared:
        while len(decided) < len(groups):
            left = groups[len(decided) :]
            first, *others = (sent_to(role, test_set, limits, list(texts)) for texts, test_set, _ in left)
            sent = first | {"others": others, "shared_seconds": SHARED_SECONDS}
            run = prepared.run(b"", (marshal.dumps(sent, 2),))
            found = _found(run, role, first["name"], [len(texts) for texts, _, _ in left])
            if found is None:
                return [*decided, *(None for _ in left)]
            decided += found
    for (texts, test_set, want_details), verdicts in zip(groups, decided, strict=True):
        for text, verdict in zip(texts, verdicts or [], strict=True):
            complete(verdict, test_set, text, want_details=want_details)
    return decided


def _found(run: ProgramRun, role: Role, name: str, wanted: Sequence[int]) -> list[list[Verdict]] | None:
    """The verdicts of the groups that a fork has scored, the first and as many as it took; None where it is spoilt."""
    found: list[list[Verdict]] = []
    for line in run.stdout.splitlines():
        verdict = read_line(line, role, name)
        if verdict is None:
            found.append([])
        elif is_fault(verdict) or not found:
            return None
        else:
            found[-1].append(verdict)
    is_whole = [len(verdicts) for verdicts in found] == list(wanted[: len(found)])
    ended_well = run.ending is RunEnding.EXITED and run.code == 0
    return found if found and is_whole and ended_well else None
