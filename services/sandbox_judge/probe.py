"""Which isolation tier works here? Found out by running honest and forbidden programs in each, strongest first.

`python -m services.sandbox_judge.probe` prints what it found as JSON; `spo doctor` shows it.

Responses of each kind that are known to be right: where one is not decided rightly, the fault is the judge's.

The judge tries them where it has failed on another response, and `spo doctor` tries them all.
"""

from __future__ import annotations

import json
import platform
import sys

from services.sandbox_judge.executor import CompileFailed, JudgeFault, RunEnding, RunLimits, language_of
from services.sandbox_judge.isolation import TIERS, Executable, Preload, Zygote
from services.sandbox_judge.program_judge import JudgeOptions, ProgramJudge
from services.sandbox_judge.sandbox_worker import (
    PRELOADS,
    Role,
    SandboxWorker,
    memory_parent,
    start_zygote,
    this_machine,
)
from services.sandbox_judge.scoring import (
    MATH,
    REASONING_GYM,
    SCORING_ROLES,
    judge_code,
    missing_module,
    score_responses,
)
from services.sandbox_judge.settings import IsolationTier, Settings
from spo.errors import NotReady
from spo.observability import configure_logs, get_logger
from spo.v1 import verdict_pb2 as wire

_MODULE_TESTS = "assert one() == 1"
_PYTEST_TESTS = "from solution import one\ndef test_one():\n    assert one() == 1\n"
_ENTRY = {"question": "1 + 1 =", "answer": "2", "metadata": {}}
# A right response of each kind, with what decides on it.
_RIGHT: dict[Role, tuple[str, wire.TestSet]] = {
    Role.PROGRAM: ("print(int(input()) + 1)", wire.TestSet(tests=[wire.TestCase(stdin=b"41\n", stdout=b"42\n")])),
    Role.TESTS: (
        "def one():\n    return 1\n",
        wire.TestSet(code_tests=wire.CodeTests(style=wire.CodeTestStyle.CODE_TEST_STYLE_MODULE, code=_MODULE_TESTS)),
    ),
    Role.PYTEST: (
        "def one():\n    return 1\n",
        wire.TestSet(
            code_tests=wire.CodeTests(
                style=wire.CodeTestStyle.CODE_TEST_STYLE_PYTEST,
                code=_PYTEST_TESTS,
            )
        ),
    ),
    Role.FUNCTION: (
        "1",
        wire.TestSet(
            scoring_function=wire.ScoringFunction(source="def score(response):\n    return 1.0\n", function="score")
        ),
    ),
    Role.MATHEMATICS: (
        "0.5",
        wire.TestSet(
            answer=wire.AnswerRule(
                expected=["1/2"], comparison=MATH, extraction=wire.AnswerExtraction.ANSWER_EXTRACTION_FIRST_LINE
            )
        ),
    ),
    Role.REASONING_GYM: (
        "<answer>2</answer>",
        wire.TestSet(
            scoring_function=wire.ScoringFunction(
                library=REASONING_GYM,
                arguments_json=json.dumps({"dataset": "chain_sum", "entry": _ENTRY, "tag": "answer"}),
            )
        ),
    ),
}
# A program that does nothing, in languages where that is not the empty one.
_IDLE = {
    "c": "int main(void) { return 0; }",
    "cpp": "int main() { return 0; }",
    "java": "public class Main { public static void main(String[] words) { } }",
}


def roles_here() -> list[Role]:
    """What this judge decides by: programs, and each kind whose package is installed."""
    return [role for role in _RIGHT if role is Role.PROGRAM or not missing_module(role)]


def role_fault(worker: SandboxWorker, role: Role) -> str | None:
    """Why a role does not decide rightly here, found out by a right response of its kind; None where it does."""
    response, test_set = _RIGHT[role]
    try:
        if role is Role.PROGRAM:
            verdict = ProgramJudge(len(response)).judge(worker, response, "python", test_set)
        elif role in SCORING_ROLES:
            (verdict,) = score_responses(worker, [response], test_set, JudgeOptions())
        else:
            verdict = judge_code(worker, response, test_set, len(response), want_details=False)
    except JudgeFault as fault:
        return str(fault) or "it broke"
    return (
        None
        if verdict.outcome == wire.Outcome.OUTCOME_ACCEPTED
        else verdict.detail or wire.Outcome.Name(verdict.outcome)
    )


def language_fault(worker: SandboxWorker, language: str) -> str | None:
    """Why programs of a language cannot be judged here, found out by one that does nothing; None where they can."""
    program = _IDLE.get(language_of(language).name, "")
    try:
        verdict = ProgramJudge(1 << 10).judge(worker, program, language, wire.TestSet(tests=[wire.TestCase()]))
    except JudgeFault as fault:
        return str(fault) or "it broke"
    return (
        None
        if verdict.outcome == wire.Outcome.OUTCOME_ACCEPTED
        else verdict.detail or wire.Outcome.Name(verdict.outcome)
    )


log = get_logger("isolation")

PROBES = 3
# In gVisor the tier without Landlock is left: user namespaces and seccomp, which the zygote installs by prctl.
_ON_GVISOR = (
    "In gVisor namespaces+seccomp can work: the pod needs user namespaces (bubblewrap without root) and a runsc"
    " that has pidfd_open; else run the judge without this runtime class, or set SPO_SANDBOX_JUDGE_ISOLATION=docker"
)
_ON_LINUX = "Either unprivileged user namespaces (bubblewrap) or Landlock (Linux 5.13) must be there"
_HONEST = b"import platform; print(int(input()) + 1, platform.python_version())"
# Each of them prints "escaped" when the tier does not hold.
_FORBIDDEN = (
    b"import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM); print('escaped')",
    b"import os; os.fork(); print('escaped')",
    b"open('/usr/escaped', 'w'); print('escaped')",
    b"import os; os.kill(1, 0); print('escaped')",
    b"import os; os.execv('/bin/true', ['true'])",
    b"import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print('escaped')",
)
_READS_SYSTEM = b"open('/etc/hostname').read(); print('escaped')"


def choose_tier(settings: Settings) -> IsolationTier:
    """The strongest tier that works and settings allow. Raises NotReady (code "no_isolation") when there is none."""
    floor = TIERS.index(settings.minimum_isolation)
    allowed = _automatic(floor) if settings.isolation == "auto" else (settings.isolation,)
    reasons = []
    for tier in allowed:
        if TIERS.index(tier) > floor:
            reasons.append(f"{tier}: below the required {settings.minimum_isolation}")
            continue
        problem = why_not(tier, settings)
        if problem is None:
            log.info("isolation tier chosen", tier=tier, rejected=reasons)
            return tier
        reasons.append(f"{tier}: {problem}")
        log.warning("isolation tier does not work here", tier=tier, reason=problem)
    machine = this_machine()
    advice = _ON_GVISOR if machine.gvisor else _ON_LINUX
    raise NotReady(
        f"no safe way to run programs on this machine ({machine.kernel}): {'; '.join(reasons)}. {advice}",
        code="no_isolation",
    )


def _automatic(floor: int) -> tuple[IsolationTier, ...]:
    """Docker only where it is asked for: whoever may talk to the engine is root."""
    return tuple(tier for tier in TIERS[: floor + 1] if tier != "docker")


def why_not(tier: IsolationTier, settings: Settings | None = None) -> str | None:
    """None when the tier starts, runs an honest program and stops the forbidden ones; otherwise the reason.

    A tier is given up only when it fails again and again: bad luck at the start must not lower it.
    """
    problem = None
    for _ in range(PROBES):
        problem = _probe(tier, settings or Settings())
        if problem is None:
            break
    return problem


def _probe(tier: IsolationTier, settings: Settings) -> str | None:
    if tier == "docker" and not settings.docker_image:
        return "SPO_SANDBOX_JUDGE_DOCKER_IMAGE names no image"
    try:
        zygote = start_zygote(tier, 0, settings)
    except (JudgeFault, NotReady) as fault:
        return str(fault)
    try:
        if tier.endswith("landlock") and not zygote.landlock_abi:
            return this_machine().why_no_landlock()
        return _first_failure(zygote, may_read_image=bool(tier == "docker" and settings.docker_runtime))
    except (JudgeFault, CompileFailed) as fault:
        return str(fault)
    finally:
        zygote.close()


def _first_failure(zygote: Zygote, *, may_read_image: bool) -> str | None:
    limits = RunLimits()
    with zygote.open(Executable(source=_HONEST), limits) as program:
        run = program.run(b"41\n")
        if run.stdout.split()[:1] != [b"42"]:
            return f"an honest program failed: {run.stderr.decode(errors='replace')}"
        if run.stdout.split()[1].decode() != platform.python_version():
            return f"its Python is {run.stdout.split()[1].decode()}, the judge's {platform.python_version()}"
    # A runtime with a kernel of its own may lack Landlock; what it lets programs read is the image.
    excused = may_read_image and not zygote.landlock_abi
    for source in _FORBIDDEN if excused else (*_FORBIDDEN, _READS_SYSTEM):
        with zygote.open(Executable(source=source), limits) as program:
            run = program.run(b"")
            if b"escaped" in run.stdout or (run.ending is RunEnding.EXITED and run.code == 0):
                return f"a forbidden program got through: {source.decode()}"
    return None


def require_packages(tier: IsolationTier, settings: Settings) -> None:
    """Import what every role imports inside the jail. Raises NotReady (code "jail_lacks_packages") with the reason."""
    preloads = [PRELOADS[role] for role in roles_here() if role in PRELOADS]
    imports = dict.fromkeys(name for preload in preloads for name in preload.imports)
    problem = _import_fault(tier, settings, tuple(imports))
    if problem is None:
        return
    faults = {name: fault for name in imports if (fault := _import_fault(tier, settings, (name,)))}
    told = "; ".join(f"{name}: {fault.rpartition(chr(10))[2]}" for name, fault in faults.items()) or problem
    raise NotReady(
        f"packages that are installed cannot be imported in the sandbox ({tier}): {told}. Is the environment readable"
        " for other users?",
        code="jail_lacks_packages",
    )


def _import_fault(tier: IsolationTier, settings: Settings, imports: tuple[str, ...]) -> str | None:
    fault = None
    for _ in range(PROBES):
        try:
            start_zygote(tier, 0, settings, preload=Preload("", imports, rehearsed=False)).close()
            return None
        except JudgeFault as error:
            fault = str(error)
    return fault


def _kinds(tier: IsolationTier | None, settings: Settings) -> dict[str, str | None]:
    """One response of each kind, judged on a tier: why it is not decided rightly."""
    if tier is None:
        return {}
    worker = SandboxWorker(tier, 0, settings, rehearsed=False)
    try:
        return {role.value: role_fault(worker, role) for role in roles_here()}
    finally:
        worker.close()


def main() -> None:
    """Print every tier with the reason why it does not work, null where it does, the one that would be chosen, and the
    same of each kind of response there."""
    configure_logs("probe", "error")
    settings = Settings()
    tiers = {tier: why_not(tier, settings) for tier in TIERS if tier != "docker" or settings.docker_image}
    try:
        chosen, refusal = choose_tier(settings), ""
    except NotReady as error:
        chosen, refusal = None, error.message
    cgroup = memory_parent(settings.memory_cgroup) is not None
    kernel = this_machine().kernel
    kinds = _kinds(chosen, settings)
    found = {
        "tiers": tiers,
        "chosen": chosen,
        "refusal": refusal,
        "kinds": kinds,
        "memory_cgroup": cgroup,
        "kernel": kernel,
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
