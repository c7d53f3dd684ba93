"""Does the judge leak? Memory, processes, descriptors and mounts before and after very many programs.

100,000 programs take about ten minutes of two cores; SPO_SOAK_PROGRAMS asks for another number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil

from benchmarks.frame import Row, run
from services.sandbox_judge.lanes import Lane, Role
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.verdict import Court
from spo.v1 import verdict_pb2

PROGRAMS = int(os.environ.get("SPO_SOAK_PROGRAMS", "100000"))
SETTLING_PROGRAMS = 500
MEMORY_GROWTH_BYTES = 8 << 20
TESTS = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdin=b"4\n", stdout=b"8\n")])
KINDS = (
    "print(2 * int(input()))",
    "print(int(input()))",
    "print(",
    "1 / 0",
    "import os; os.fork()",
    "open('/tmp/left', 'w').write('x' * 100_000)",
    "import threading; threading.Thread(target=print, args=(8,)).start()",
    "import os; os.kill(os.getpid(), 9)",
)


@dataclass(frozen=True)
class Footprint:
    """What a leak would make grow."""

    memory_bytes: int
    processes: int
    descriptors: int
    mounts: int
    temporary_files: int


def measure() -> list[Row]:
    """Run the programs; every kind of leak is a row whose yardstick is what is allowed."""
    lane, court = Lane(choose_tier(Settings()), 0), Court(max_source_bytes=1 << 16)
    programs = _programs()
    _judge(court, lane, islice(programs, SETTLING_PROGRAMS))
    before = _footprint(lane)
    _judge(court, lane, islice(programs, PROGRAMS))
    after = _footprint(lane)
    lane.close()
    return [
        _growth("memory", "bytes", after.memory_bytes - before.memory_bytes, MEMORY_GROWTH_BYTES),
        _growth("processes", "", after.processes - before.processes, 0),
        _growth("descriptors", "", after.descriptors - before.descriptors, 0),
        _growth("mounts", "", after.mounts - before.mounts, 0),
        _growth("temporary files", "", after.temporary_files - before.temporary_files, 0),
    ]


def _programs() -> Iterator[str]:
    number = 0
    while True:
        yield f"{KINDS[number % len(KINDS)]}\n#{number}" if number % len(KINDS) != 2 else KINDS[2]
        number += 1


def _judge(court: Court, lane: Lane, programs: Iterator[str]) -> None:
    for program in programs:
        court.judge(lane, program, "python", TESTS, want_details=False)
        lane.retire_old()


def _footprint(lane: Lane) -> Footprint:
    judge = psutil.Process()
    family = [judge, psutil.Process(lane.zygote(Role.PROGRAM).pid), *judge.children(recursive=True)]
    return Footprint(
        memory_bytes=judge.memory_info().rss,
        processes=len({process.pid for process in family}),
        descriptors=len(os.listdir("/proc/self/fd")),
        mounts=len(Path("/proc/self/mounts").read_text().splitlines()),
        temporary_files=len([name for name in os.listdir("/tmp") if name.startswith("spo-judge-") or name == "left"]),
    )


def _growth(name: str, unit: str, grown: int, allowed: int) -> Row:
    ratio = (allowed + 1) / (max(0, grown) + 1)
    return Row(
        f"{name} grown over {PROGRAMS:,} programs", grown, unit, "allowed", allowed, ratio, 1.0, grown <= allowed
    )


if __name__ == "__main__":
    sys.exit(run("judge_soak", measure))
