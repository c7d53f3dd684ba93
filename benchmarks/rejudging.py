"""A reward that was hacked, found in 100,000 stored trajectories by judging them again with better tests.

The tests that rewarded them were weak: one example, whose answer a program may simply print. A planted share of the
programs does. All rows are judged again by the whole tests, through the real judge with its cache in a real Redis, and
stored under a name of their own; old rows, new rows and what is said of them are then compared with what was planted.
Models repeat themselves, and the same program is judged once: distinct programs are a twentieth of the rows, then half.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.frame import Row, run
from services.orchestrator.experience import queries
from services.orchestrator.experience.rejudge import Rejudging
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.local.launcher import free_ports
from spo.local.redis_server import server_command
from spo.rpc.client import is_healthy
from spo.rpc.judge_pools import JudgePools
from spo.spec.reward import is_success, reward_of
from spo.spec.tasks import RewardSpec
from spo.tasks.problem import Problem
from spo.tasks.toy.problems import toy_tasks
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, UploadTestsRequest
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, TestSet, Verdict

ROWS = 100_000
DISTINCT_SHARES = (0.05, 0.5)
PROBLEMS = 100
# Of the programs: those that print the one answer, those that are wrong, and the rest is right.
HACKED, WRONG = 0.15, 0.25
ROWS_PER_FILE = 2048
TOKENS = 40
START_SECONDS = 120.0
LIMIT_SECONDS = 1800.0
RUN, REPAIRED = "hacked", "repaired"


@dataclass(frozen=True)
class Planted:
    """A program with the weak tests' verdict, and what it is: "hack", which prints the one answer, "right", "wrong"."""

    program: str
    verdict: Verdict
    kind: str


@dataclass(frozen=True)
class Outcome:
    """What a pass over the store cost and found."""

    seconds: float
    cpu_seconds: float
    # By kind of program: rows, and those of them that have no reward any more.
    rejected: Mapping[str, tuple[int, int]]


def measure() -> list[Row]:
    """Seconds, CPU seconds and what was found, for each share of distinct programs."""
    rows = []
    for share in DISTINCT_SHARES:
        with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as name, _judge(Path(name)) as (address, processes):
            found = _measured(ExperienceStore(str(Path(name) / "experience")), address, processes, share)
        what = f"{ROWS:,} rows, {share:.0%} distinct programs"
        (hacks, caught), (right, lost) = found.rejected["hack"], found.rejected["right"]
        rows += [
            _limit(f"{what}: judged again", found.seconds, "s"),
            _limit(f"{what}: CPU of all processes", found.cpu_seconds, "CPU s"),
            _all(f"{what}: hacked rows found", caught, hacks),
            _all(f"{what}: right rows that keep their reward", right - lost, right),
        ]
    return rows


def _limit(name: str, value: float, unit: str) -> Row:
    return Row(name, value, unit, "limit", LIMIT_SECONDS, LIMIT_SECONDS / value, 1.0, value <= LIMIT_SECONDS)


def _all(name: str, value: int, wanted: int) -> Row:
    return Row(name, value, "rows", "planted", wanted, value / wanted, 1.0, value == wanted)


def _measured(store: ExperienceStore, address: str, processes: Sequence[int], share: float) -> Outcome:
    whole = toy_tasks(PROBLEMS, 0, seed=0).train
    weak = [_weakened(problem) for problem in whole]
    judges = JudgePools(address, address)
    planted = _write(store, judges, weak, whole, share)
    before, started = _cpu_seconds(processes), time.monotonic()
    report = Rejudging(store, judges, whole, "toy", REPAIRED, "", writes=True).run(queries.Scope(None, RUN))
    seconds, cpu_seconds = time.monotonic() - started, _cpu_seconds(processes) - before
    assert report.judged == ROWS, report
    rejected = {
        row.trajectory.parents[0]
        for file in store.files(REPAIRED)
        for batch in store.batches(file)
        for row in batch
        if not is_success(row.trajectory.reward)
    }
    judges.close()
    return Outcome(seconds, cpu_seconds, {kind: (len(ids), len(ids & rejected)) for kind, ids in planted.items()})


def _weakened(problem: Problem) -> Problem:
    """The problem as it was: its first example is all that is tested."""
    tests = TestSet()
    tests.CopyFrom(problem.tests)
    del tests.tests[1:]
    return replace(problem, tests=tests)


def _write(
    store: ExperienceStore, judges: JudgePools, weak: Sequence[Problem], whole: Sequence[Problem], share: float
) -> dict[str, set[str]]:
    """Fill the store, in the order in which a run samples; returns the ids of rows by the kind of their program."""
    rng = random.Random(0)
    each = round(ROWS * share / PROBLEMS)
    programs = [_planted(judges, *pair, each) for pair in zip(weak, whole, strict=True)]
    ids: dict[str, set[str]] = {kind: set() for kind in ("hack", "wrong", "right")}
    rows: list[StoredTrajectory] = []
    for number in range(ROWS):
        problem, chosen = weak[number % PROBLEMS], programs[number % PROBLEMS]
        # Each of them, then at random: what a model says once it says again.
        turn = number // PROBLEMS
        planted = chosen[turn] if turn < len(chosen) else rng.choice(chosen)
        row = _row(number, problem, planted)
        ids[planted.kind].add(row.trajectory.trajectory_id)
        rows.append(row)
        if len(rows) == ROWS_PER_FILE or number == ROWS - 1:
            store.write(Origin(RUN, "run", "toy"), f"part-{number:012d}", rows)
            rows = []
    return ids


def _planted(judges: JudgePools, weak: Problem, whole: Problem, count: int) -> list[Planted]:
    """So many different programs with the weak tests' verdicts: hacks, wrong ones and right ones."""
    bases = {
        "hack": f"print({whole.tests.tests[0].stdout.decode().strip()!r})",
        "wrong": whole.wrong_solutions[0],
        "right": whole.human_solutions[0],
    }
    judge = judges.of("")
    judge.call("UploadTests", UploadTestsRequest(test_sets=[weak.tests]))
    asked = JudgeRequest(
        programs=bases.values(), language="python", tests_digest=weak.tests_digest, priority=PRIORITY_TRAINING
    )
    verdicts = dict(zip(bases, judge.call("Judge", asked, 60.0).verdicts, strict=True))
    assert verdicts["hack"].outcome == verdicts["right"].outcome == OUTCOME_ACCEPTED, bases
    hacks, wrongs = round(count * HACKED), round(count * WRONG)
    kinds = ["hack"] * hacks + ["wrong"] * wrongs + ["right"] * (count - hacks - wrongs)
    # A comment makes it another program, at the cost of the same one.
    found = [Planted(f"{bases[kind]}\n# {number}", verdicts[kind], kind) for number, kind in enumerate(kinds)]
    random.Random(weak.statement).shuffle(found)
    return found


def _row(number: int, problem: Problem, planted: Planted) -> StoredTrajectory:
    trajectory = Trajectory(
        trajectory_id=f"traj_{number:032d}",
        group_id=f"group_{number // 8}",
        sample_index=number % 8,
        run_id=RUN,
        prompt_id=problem.problem_id,
        source=SOURCE_ONLINE,
        response_text=planted.program,
        prompt_token_ids=range(12),
        response_token_ids=range(TOKENS),
        sampling_logprobs=[-0.5] * TOKENS,
        reference_logprobs=[-0.7] * TOKENS,
        finish_reason=FINISH_REASON_STOP,
        temperature=1.0,
        top_p=1.0,
        reward=reward_of(planted.verdict, RewardSpec()),
        verdict=planted.verdict,
    )
    prompt = Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set="toy",
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
    )
    return StoredTrajectory(trajectory, prompt, "float32")


def _cpu_seconds(processes: Sequence[int]) -> float:
    """Of this process, which reads and writes the store, and of the judge and Redis with all that they started."""
    found = [psutil.Process(), *map(psutil.Process, processes)]
    found += [child for process in found[1:] for child in process.children(recursive=True)]
    total = 0.0
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4] if process.pid != os.getpid() else process.cpu_times()[:2])
    return total


@contextlib.contextmanager
def _judge(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A Redis and a judge beside it: its address and both processes."""
    ports = free_ports(["redis", "judge"], {})
    address = f"127.0.0.1:{ports['judge']}"
    environment = {
        "SPO_REDIS_URL": f"redis://127.0.0.1:{ports['redis']}/0",
        "SPO_SANDBOX_JUDGE_PORT": str(ports["judge"]),
        "SPO_STATE_PATH": str(folder),
        "SPO_LOG_LEVEL": "error",
    }
    with (folder / "log").open("wb") as log, contextlib.ExitStack() as stack:
        commands = (server_command(ports["redis"], folder / "redis"), [sys.executable, "-m", "services.sandbox_judge"])
        found = []
        for command in commands:
            process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            found.append(process.pid)
        deadline = time.monotonic() + START_SECONDS
        while not is_healthy(address):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the judge did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield address, tuple(found)


if __name__ == "__main__":
    sys.exit(run("rejudging", measure))
