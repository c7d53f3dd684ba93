"""Does the judge leak? Memory, processes, descriptors, mounts and files, looked at ten times over very many programs.

100,000 programs, honest and hostile, take about ten minutes of two cores; SPO_SOAK_PROGRAMS asks for another number.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.frame import Row, run
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.program_judge import ProgramJudge
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from services.sandbox_judge.settings import Settings
from spo.v1.verdict_pb2 import Outcome, TestCase, TestSet

PROGRAMS = int(os.environ.get("SPO_SOAK_PROGRAMS", "100000"))
LOOKS = 10
WORKERS = 4 * (os.cpu_count() or 1)
SETTLING_PROGRAMS = 500
MEMORY_GROWTH_BYTES = 8 << 20
TESTS = TestSet(tests=[TestCase(stdin=b"4\n", stdout=b"8\n")])
KINDS = (
    ("print(2 * int(input()))", Outcome.OUTCOME_ACCEPTED),
    ("print(int(input()))", Outcome.OUTCOME_WRONG_ANSWER),
    ("print(", Outcome.OUTCOME_COMPILE_ERROR),
    ("1 / 0", Outcome.OUTCOME_RUNTIME_ERROR),
    ("import os; os.fork()", Outcome.OUTCOME_RUNTIME_ERROR),
    ("import os; os.mkdir('left'); open('left/left', 'w').write('x' * 100_000); print(8)", Outcome.OUTCOME_ACCEPTED),
    ("import threading; threading.Thread(target=print, args=(8,)).start()", Outcome.OUTCOME_ACCEPTED),
    ("import os; os.kill(os.getpid(), 9)", Outcome.OUTCOME_RUNTIME_ERROR),
)


@dataclass(frozen=True)
class Footprint:
    """What a leak would make grow."""

    memory_bytes: int
    zygote_memory_bytes: int
    processes: int
    descriptors: int
    mounts: int
    temporary_files: int


def measure() -> list[Row]:
    """Run the programs in several workers; every kind of leak is a row whose yardstick is what is allowed."""
    program_judge, tier = ProgramJudge(max_source_bytes=1 << 16), choose_tier(Settings())
    with tempfile.TemporaryDirectory(prefix="spo-soak-") as folder:
        tempfile.tempdir = folder  # so that files of the judge can be told from others'
        workers = [SandboxWorker(tier, index) for index in range(WORKERS)]
        # Threads that last: the kernel ends a zygote together with the thread that has started it.
        with ThreadPoolExecutor(WORKERS) as threads:
            _judge(threads, program_judge, workers, SETTLING_PROGRAMS)
            series = [_footprint(folder)]
            for _ in range(LOOKS):
                _judge(threads, program_judge, workers, PROGRAMS // LOOKS)
                series.append(_footprint(folder))
            for worker in workers:
                worker.close()
    return [*_memory_series(series), *_growths(series)]


def _judge(
    threads: ThreadPoolExecutor, program_judge: ProgramJudge, workers: Sequence[SandboxWorker], count: int
) -> None:
    for done in [threads.submit(_judge_in, program_judge, worker, count // len(workers)) for worker in workers]:
        done.result()


def _judge_in(program_judge: ProgramJudge, worker: SandboxWorker, count: int) -> None:
    for number in range(count):
        program, outcome = KINDS[number % len(KINDS)]
        verdict = program_judge.judge(worker, program, "python", TESTS)
        if verdict.outcome != outcome:
            raise AssertionError(f"{Outcome.Name(verdict.outcome)} for {program}: {verdict.detail}")
        worker.retire_old()
    worker.zygote(Role.PROGRAM)


def _footprint(folder: str) -> Footprint:
    judge = psutil.Process()
    family = judge.children(recursive=True)
    return Footprint(
        memory_bytes=judge.memory_info().rss,
        zygote_memory_bytes=max(each.memory_info().rss for each in family),
        processes=len(family) + 1,
        descriptors=len(os.listdir("/proc/self/fd")),
        mounts=len(Path("/proc/self/mounts").read_text().splitlines()),
        temporary_files=sum(len(files) + len(folders) for _, folders, files in os.walk(folder)),
    )


def _memory_series(series: Sequence[Footprint]) -> list[Row]:
    """The judge's memory over time."""
    allowed = (series[0].memory_bytes + MEMORY_GROWTH_BYTES) / 2**20
    return [
        Row(
            f"memory of the judge after {look * PROGRAMS // LOOKS:,} programs",
            value,
            "MiB",
            "allowed",
            allowed,
            allowed / value,
            1.0,
            value <= allowed,
        )
        for look, value in enumerate(each.memory_bytes / 2**20 for each in series)
    ]


def _growths(series: Sequence[Footprint]) -> list[Row]:
    """How much of everything there is more at the end, or was in between, than at the start."""
    allowed = {"memory_bytes": MEMORY_GROWTH_BYTES, "zygote_memory_bytes": MEMORY_GROWTH_BYTES}
    rows = []
    for kind in vars(series[0]):
        grown, limit = max(getattr(each, kind) for each in series) - getattr(series[0], kind), allowed.get(kind, 0)
        name, unit = kind.removesuffix("_bytes").replace("_", " "), "bytes" if kind.endswith("_bytes") else ""
        ratio = (limit + 1) / (max(0, grown) + 1)
        name = f"{name} grown over {PROGRAMS:,} programs"
        rows.append(Row(name, grown, unit, "allowed", limit, ratio, 1.0, grown <= limit))
    return rows


if __name__ == "__main__":
    sys.exit(run("judge_soak", measure))
