"""What judging a program costs, in CPU time, isolation included, against starting an interpreter for it.

The programs are the toy contest's. CPU time is the judge's own and that of everything below it; the zygote is already
running, because it serves thousands of programs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.frame import Measure, Row, compare, run
from services.sandbox_judge.isolation import launch
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.program_judge import ProgramJudge
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from services.sandbox_judge.settings import IsolationTier, Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.local.launcher import server_command
from spo.messaging.redis_client import RedisClient, connect
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import Outcome

PROGRAM = "a=list(map(int,input().split()))\nb=[x*x for x in a if x%2==0]\nprint(sum(b)+3)\n"
LINE, ANSWER = b"1 2 3 -4 5 6\n", b"59\n"
TOY_TESTS = 12
PROGRAMS = 100
WARM_PROGRAMS = 1024
ROUNDS = 5


def measure() -> list[Row]:
    """All claims, in the strongest tier that works here."""
    tier = choose_tier(Settings())
    one = _test_set(1)
    rows = [
        compare(
            f"programs, one test each ({tier})",
            "per CPU s",
            "python -I -S, not isolated",
            lambda: PROGRAMS / _judging(tier, one),
            lambda: PROGRAMS / _spawning([os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM]),
            goal=2.0,
            rounds=ROUNDS,
        )
    ]
    if tier.startswith("namespaces"):
        rows.append(
            compare(
                "programs, one test each",
                "per CPU s",
                "bubblewrap + python, same imports",
                lambda: PROGRAMS / _judging(tier, one),
                lambda: PROGRAMS / _spawning(_jailed_python(tier)),
                goal=7.0,
                rounds=ROUNDS,
            )
        )
    return [
        *rows,
        _at_least("toy tests, cache cold", 400, lambda: _cold(tier)),
        _at_least("verdicts, cache warm", 5000, lambda: _warm(tier)),
    ]


def _test_set(tests: int) -> verdict_pb2.TestSet:
    return verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdin=LINE, stdout=ANSWER)] * tests)


def _programs(count: int) -> list[str]:
    return [f"{PROGRAM}#{number}" for number in range(count)]


def _judging(tier: IsolationTier, tests: verdict_pb2.TestSet) -> float:
    """CPU seconds to judge PROGRAMS different programs."""
    program_judge, worker = ProgramJudge(max_source_bytes=1 << 16), SandboxWorker(tier, 0)
    zygote = psutil.Process(worker.zygote(Role.PROGRAM).pid)
    family = [zygote, *zygote.children(recursive=True)]
    started = _cpu_seconds() + _cpu_seconds_of(family)
    for program in _programs(PROGRAMS):
        verdict = program_judge.judge(worker, program, "python", tests)
        assert verdict.outcome == Outcome.OUTCOME_ACCEPTED, verdict.detail
    used = _cpu_seconds() + _cpu_seconds_of(family) - started
    worker.close()
    return used


def _spawning(command: Sequence[str]) -> float:
    """CPU seconds to run the program PROGRAMS times as a process of its own."""
    started = _cpu_seconds()
    for _ in range(PROGRAMS):
        done = subprocess.run(command, input=LINE, stdout=subprocess.PIPE, check=True)
        assert done.stdout == ANSWER
    return _cpu_seconds() - started


def _jailed_python(tier: IsolationTier) -> list[str]:
    """The zygote's own bubblewrap command with a plain interpreter that imports what the zygote has imported."""
    from services.sandbox_judge.jail.zygote import COMMON_IMPORTS

    command = launch(tier, 0).command
    imports = "".join(f"import {name}\n" for name in COMMON_IMPORTS.split())
    return [*command[: command.index("--") + 2], "-I", "-S", "-c", imports + PROGRAM]


def _cold(tier: IsolationTier) -> float:
    return PROGRAMS * TOY_TESTS / _judging(tier, _test_set(TOY_TESTS))


def _warm(tier: IsolationTier) -> float:
    """Verdicts per CPU second of the judge when the cache knows them all, in requests of 128 programs."""
    with serving_redis() as client:
        scheduler = JudgeScheduler(client, Settings(), tier, workers=os.cpu_count() or 1)
        digest = scheduler.test_sets.upload(_test_set(1))
        programs = _programs(WARM_PROGRAMS)
        requests = [programs[start : start + 128] for start in range(0, WARM_PROGRAMS, 128)]
        for request in requests:
            scheduler.submit(request, "python", digest, Priority.PRIORITY_TRAINING).verdicts(600)
        started = time.process_time()
        for request in requests:
            scheduler.submit(request, "python", digest, Priority.PRIORITY_TRAINING).verdicts(600)
        used = time.process_time() - started
        scheduler.close()
    return WARM_PROGRAMS / used


@contextlib.contextmanager
def serving_redis() -> Iterator[RedisClient]:
    """A Redis of its own."""
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder:
        port = 20_000 + os.getpid() % 20_000
        server = subprocess.Popen(server_command(port, Path(folder)), stdout=subprocess.DEVNULL)
        try:
            with connect(f"redis://127.0.0.1:{port}/0") as client:
                yield client
        finally:
            server.terminate()
            server.wait(20)


def _at_least(name: str, goal: float, measured: Measure) -> Row:
    """A claim without a peer: the median of a rate reaches the goal, which stands in as the yardstick."""
    value = statistics.median(measured() for _ in range(ROUNDS))
    return Row(name, value, "per CPU s", "goal", goal, value / goal, 1.0, value >= goal)


def _cpu_seconds_of(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds of live processes and of the children they have waited for."""
    return sum(sum(process.cpu_times()[:4]) for process in processes)


def _cpu_seconds() -> float:
    own, below = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + below.ru_utime + below.ru_stime


SMOKE: dict[str, object] = {"PROGRAMS": 4, "WARM_PROGRAMS": 4, "ROUNDS": 1}


if __name__ == "__main__":
    sys.exit(run("judge", measure, smoke=SMOKE))
