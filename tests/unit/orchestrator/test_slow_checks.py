"""One tenant's slow task set and slow checks hold up nobody else's, and what active jobs use stays loaded."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from services.orchestrator import datasets as datasets_module
from services.orchestrator.container import SharedThreads
from services.orchestrator.datasets import TaskLibrary, size_of
from spo.errors import InvalidInput, NotReady
from spo.spec.tasks import TasksSpec
from spo.tasks.load import load_tasks
from spo.tasks.problem import TaskSets

SECONDS = 20


class Loads:
    """Stands in for the reader of files: counts what is read, and holds up those that it is asked to."""

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()
        self.slow: dict[str, threading.Event] = {}
        self.began = threading.Semaphore(0)

    def __call__(self, spec: TasksSpec) -> TaskSets:
        name = Path(spec.path or "").stem
        self.read[name] += 1
        self.began.release()
        if name in self.slow:
            assert self.slow[name].wait(SECONDS)
        return load_tasks(spec)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    found = Loads()
    monkeypatch.setattr(datasets_module, "load_tasks", found)
    return found


def tasks(folder: Path, name: str, count: int = 12) -> TasksSpec:
    file = folder / f"{name}.jsonl"
    row = '{"statement": "%s %d", "answer": {"expected": ["%d"], "comparison": "numeric"}}\n'
    file.write_text("".join(row % (name, number, number) for number in range(count)))
    return TasksSpec(kind="jsonl", path=str(file), train_problems=count - 2, evaluation_problems=2)


def test_a_slow_set_holds_up_neither_what_is_loaded_nor_what_is_loaded_beside_it(tmp_path: Path, loads: Loads) -> None:
    library, loads.slow = TaskLibrary(), {"slow": threading.Event()}
    known, slow = tasks(tmp_path, "known"), tasks(tmp_path, "slow")
    library.load(known)
    with ThreadPoolExecutor(4) as threads:
        held_up = [threads.submit(library.load, slow) for _ in range(2)]
        assert all(loads.began.acquire(timeout=SECONDS) for _ in range(2))
        beside = [threads.submit(library.load, spec) for spec in (known, tasks(tmp_path, "new"))]
        assert [len(each.result(SECONDS).train) for each in beside] == [10, 10]
        assert not any(each.done() for each in held_up)
        loads.slow["slow"].set()
        first, second = (each.result(SECONDS) for each in held_up)
    assert first is second
    assert loads.read == {"known": 1, "slow": 1, "new": 1}


def test_a_load_that_failed_fails_those_who_waited_and_is_tried_again(tmp_path: Path, loads: Loads) -> None:
    library, spec = TaskLibrary(), tasks(tmp_path, "broken")
    file = tmp_path / "broken.jsonl"
    file.write_text("{}\n" * 20)
    loads.slow = {"broken": threading.Event()}
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(library.load, spec) for _ in range(2)]
        assert loads.began.acquire(timeout=SECONDS)
        loads.slow["broken"].set()
        assert all(isinstance(each.exception(SECONDS), InvalidInput) for each in both)
    before = loads.read["broken"]
    with pytest.raises(InvalidInput):
        library.load(spec)
    assert loads.read["broken"] == before + 1


def test_a_changed_file_is_read_again(tmp_path: Path, loads: Loads) -> None:
    library = TaskLibrary()
    assert len(library.load(tasks(tmp_path, "one")).train) == 10
    assert len(library.load(tasks(tmp_path, "one", 14)).train) == 12
    assert loads.read["one"] == 2


@pytest.mark.parametrize(
    ("sets", "room", "in_use", "read_twice"),
    [
        (5, 5.0, [], []),
        (9, 100.0, [], []),
        (5, 3.5, [], ["0", "1"]),
        (5, 2.5, ["0", "1", "2", "3", "4"], []),
        (5, 2.5, ["0", "1"], ["2", "3"]),
        (3, 0.5, ["0"], ["1"]),
    ],
)
def test_what_active_jobs_use_stays_and_others_go_by_bytes_the_longest_unused_first(
    tmp_path: Path, loads: Loads, sets: int, room: float, in_use: list[str], read_twice: list[str]
) -> None:
    specs = {str(number): tasks(tmp_path, str(number)) for number in range(sets)}
    library = TaskLibrary(int(room * size_of(load_tasks(specs["0"]))))
    library.in_use = lambda: [specs[name] for name in in_use]
    for spec in specs.values():
        library.load(spec)
    first = loads.read.copy()
    for name in [name for name in specs if name not in read_twice]:
        library.load(specs[name])
    assert loads.read == first
    for name in read_twice:
        library.load(specs[name])
    assert loads.read - first == Counter(read_twice)


def test_while_it_cannot_be_seen_what_is_in_use_nothing_goes(tmp_path: Path, loads: Loads) -> None:
    def away() -> list[TasksSpec]:
        raise redis.ConnectionError("connection refused")

    library, specs = TaskLibrary(most_bytes=1), [tasks(tmp_path, name) for name in ("one", "two")]
    library.in_use = away
    for _ in range(2):
        assert [len(library.load(spec).train) for spec in specs] == [10, 10]
    assert loads.read == {"one": 1, "two": 1}


def test_a_tenant_with_slow_checks_leaves_room_for_another() -> None:
    released = threading.Event()

    async def both() -> tuple[list[object], int]:
        threads = SharedThreads(4, 4, NotReady("too many", code="checks_busy"))
        slow = [asyncio.ensure_future(threads.run(lambda: released.wait(SECONDS), "slow")) for _ in range(7)]
        try:
            quick = await asyncio.wait_for(asyncio.gather(*(threads.run(lambda: 1, "quick") for _ in range(4))), 10)
        finally:
            released.set()
        return await asyncio.gather(*slow, return_exceptions=True), sum(quick)

    answers, quick = asyncio.run(both())
    assert quick == 4
    assert [isinstance(each, NotReady) for each in answers] == [False] * 4 + [True] * 3
