"""Whose fault it is: a program's is its verdict, a kind that cannot start harms no other, the judge's is retried."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from services.sandbox_judge import isolation, sandbox_worker
from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.executor import JudgeFault
from services.sandbox_judge.isolation import TIERS, Preload
from services.sandbox_judge.probe import choose_tier, require_packages, role_fault, why_not
from services.sandbox_judge.program_judge import ProgramJudge
from services.sandbox_judge.sandbox_worker import PRELOADS, Role, SandboxWorker
from services.sandbox_judge.scoring import judge_code
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.errors import NotReady
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import Checker, CodeTests, CodeTestStyle, Outcome, ScoringFunction

PRINTS_X = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdout=b"x\n")])
SCORES = verdict_pb2.TestSet(
    scoring_function=ScoringFunction(source="def score(response):\n    return 1.0\n", function="score")
)
RIGHT = "print('x')"
strongest, why_absent = cache(lambda: choose_tier(Settings())), cache(why_not)
# Refuses with 3, as testlib does where it breaks, on what it does not expect.
CHECKER = """
import sys
given, right = open(sys.argv[2]).read().strip(), open(sys.argv[3]).read().strip()
sys.exit(3 if given == BREAKS_ON else int(given != right))
"""


@pytest.fixture
def judge() -> Iterator[JudgeScheduler]:
    settings = Settings().model_copy(update={"recheck_rate": 0.0, "cache_seconds": 0})
    scheduler = JudgeScheduler(MemoryStore(), settings, strongest(), workers=1)
    yield scheduler
    scheduler.close(20)


def outcomes(judge: JudgeScheduler, responses: list[str], test_set: verdict_pb2.TestSet = PRINTS_X) -> list[str]:
    digest = judge.test_sets.upload(test_set)
    verdicts = judge.submit(responses, "python", digest, Priority.PRIORITY_TRAINING).verdicts(120)
    return [Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower() for verdict in verdicts]


def zygotes(judge: JudgeScheduler) -> dict[Role, int]:
    return {role: zygote.pid for role, zygote in judge._workers[0]._zygotes.items()}


@pytest.mark.parametrize(
    "bad",
    [
        "import os\nos.write(2, b'jail failed: x')\nos._exit(111)",
        "import os\nos.write(2, b'jail failed: PermissionError(13)')\nos._exit(1)",
        "import os\nfor n in range(64):\n    try: os.write(n, b'!gone')\n    except OSError: pass\nos._exit(111)",
        "import os\nos.makedirs('/tmp/d/x/y')\nfor n in range(60): open(f'/tmp/moved {n}', 'w')\nos.mkdir('/tmp/d/q')",
        "import os\nos.symlink('/dev/null', '/tmp/moved 1')\nos.makedirs('/tmp/a/b')\nos.symlink('..', '/tmp/a/b/up')",
    ],
)
def test_a_response_that_speaks_as_the_jail_fails_alone_and_no_zygote_ends(judge: JudgeScheduler, bad: str) -> None:
    assert outcomes(judge, [RIGHT]) == ["accepted"]
    before = zygotes(judge)

    found = outcomes(judge, [RIGHT + "  # 1", bad, RIGHT + "  # 2"])

    assert found[::2] == ["accepted", "accepted"]
    assert found[1] in ("runtime_error", "wrong_answer")
    assert zygotes(judge) == before


def test_a_fault_that_follows_one_program_is_its_own(judge: JudgeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = ProgramJudge.judge

    def breaks(self: ProgramJudge, worker: SandboxWorker, program: str, *further: object) -> object:
        if "breaks it" not in program:
            return judged(self, worker, program, *further)  # type: ignore[arg-type]
        with worker.open(Role.PROGRAM, sandbox_worker.Executable(source=b""), sandbox_worker.RunLimits()):
            raise JudgeFault("the jail failed: it died")

    monkeypatch.setattr(ProgramJudge, "judge", breaks)

    assert outcomes(judge, [RIGHT, "breaks it", RIGHT + "#"]) == ["accepted", "runtime_error", "accepted"]


def test_a_fault_that_every_program_meets_is_the_judges(judge: JudgeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise JudgeFault("the jail failed: it died")

    monkeypatch.setattr(ProgramJudge, "judge", breaks)

    with pytest.raises(NotReady, match="it died") as refused:
        outcomes(judge, [RIGHT])
    assert refused.value.code == "judge_fault"


@pytest.mark.parametrize(("breaks_on", "found"), [("boom", ["runtime_error", "accepted"]), ("x", None)])
def test_an_output_that_breaks_a_special_judge_is_not_the_judges_fault_but_a_broken_one_is(
    judge: JudgeScheduler, breaks_on: str, found: list[str] | None
) -> None:
    test_set = verdict_pb2.TestSet(
        tests=[verdict_pb2.TestCase(stdout=b"x\n")],
        checker=Checker.CHECKER_SPECIAL,
        checker_program=CHECKER.replace("BREAKS_ON", repr(breaks_on)).encode(),
    )
    if found is None:
        with pytest.raises(NotReady, match="special judge failed"):
            outcomes(judge, [RIGHT], test_set)
    else:
        assert outcomes(judge, ["print('boom')", RIGHT], test_set) == found


def test_a_kind_that_cannot_start_is_left_in_peace_and_harms_no_other(
    judge: JudgeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Preload | None] = []
    start = sandbox_worker.start_zygote

    def counted(*arguments: object) -> object:
        started.append(arguments[-1])  # type: ignore[arg-type]
        return start(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sandbox_worker, "start_zygote", counted)
    monkeypatch.setitem(PRELOADS, Role.FUNCTION, Preload("scores_child", ("there_is_no_such_module",)))
    assert outcomes(judge, [RIGHT]) == ["accepted"]
    before = zygotes(judge)

    for number in range(3):
        with pytest.raises(NotReady, match="there_is_no_such_module") as refused:
            outcomes(judge, [f"response {number}"], SCORES)
        assert refused.value.code == "judge_role_unavailable"

    assert outcomes(judge, [RIGHT + "#"]) == ["accepted"]
    assert zygotes(judge) == before
    assert len([each for each in started if each]) <= sandbox_worker.STARTS + 1


def test_a_judge_whose_packages_cannot_be_imported_inside_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRELOADS, Role.FUNCTION, Preload("scores_child", ("numpy", "there_is_no_such_module")))
    settings = Settings()

    with pytest.raises(NotReady, match="there_is_no_such_module") as refused:
        require_packages(strongest(), settings)

    assert refused.value.code == "jail_lacks_packages"
    assert "numpy:" not in refused.value.message


@pytest.mark.parametrize(
    ("folder", "place"),
    [
        ("/tmp/venv/lib", "/judge/outside/tmp/venv/lib"),
        ("/dev/shm/venv", "/judge/outside/dev/shm/venv"),
        ("/proc/venv", "/judge/outside/proc/venv"),
        ("/judge/venv", "/judge/outside/judge/venv"),
        ("/tmpfiles/venv", "/tmpfiles/venv"),
        ("/home/ada/venv", "/home/ada/venv"),
        ("/root/.venv", "/root/.venv"),
        ("/opt/judge/venv", "/opt/judge/venv"),
    ],
)
def test_what_the_jail_covers_is_bound_where_nothing_hides_it(folder: str, place: str) -> None:
    assert isolation.inside(folder) == place


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "docker"])
@pytest.mark.parametrize("root", ["/tmp", "/var/tmp"])
def test_packages_below_any_folder_are_found_on_each_tier(
    tier: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_absent(tier):  # type: ignore[arg-type]
        pytest.skip(f"{tier}: {reason}")
    packages = Path(root) / f"spo-{tmp_path.name}-{tier[:12]}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "planted_package.py").write_text("one = 1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    tests = verdict_pb2.TestSet(
        code_tests=CodeTests(style=CodeTestStyle.CODE_TEST_STYLE_MODULE, code="assert planted() == 1")
    )
    worker = SandboxWorker(tier, 0)  # type: ignore[arg-type]
    try:
        verdict = judge_code(
            worker,
            "import planted_package\ndef planted():\n    return planted_package.one\n",
            tests,
            1000,
            want_details=False,
        )
        assert verdict.outcome == Outcome.OUTCOME_ACCEPTED, verdict.detail
        assert role_fault(worker, Role.PROGRAM) is None
    finally:
        worker.close()
        (packages / "planted_package.py").unlink()
        packages.rmdir()
        packages.parent.rmdir()
