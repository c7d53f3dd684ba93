"""What waits for the workers: programs one by one, and groups of responses that may be scored in one fork together.

Only groups of one run and one function do, so that nothing of another run or tenant is ever in their process.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from services.sandbox_judge.program_judge import JudgeOptions
from spo.v1.verdict_pb2 import TestSet, Verdict

# Groups that one fork scores at most.
MOST_GROUPS = 16
# For so long the groups of a run and function that spoilt a fork have one each.
APART_SECONDS = 60.0
_LAST = 1 << 30
_MOST_APART = 1000


@dataclass(frozen=True)
class JudgeTask:
    """One program waiting for its verdict, or several responses that are scored together.

    shares: the same text for groups that may be in one fork; empty: none may.
    """

    programs: tuple[str, ...]
    language: str
    test_set: TestSet
    options: JudgeOptions
    recheck: bool
    verdicts: tuple[Future[Verdict], ...]
    shares: str = ""


class JudgeQueue:
    """Tasks by urgency, then arrival. Safe from several threads."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # (urgency, arrival, task); a worker ends at None, which sorts after every task.
        self._queue: queue.PriorityQueue[tuple[int, int, JudgeTask | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Those that share, by arrival; the queue may hold more, which were taken together with others.
        self._sharing: dict[tuple[int, str], dict[int, JudgeTask]] = {}
        self._apart: dict[str, float] = {}

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, urgency: int, task: JudgeTask) -> None:
        """Let a task wait; the least urgency goes first."""
        number = next(self._numbers)
        if task.shares:
            with self._lock:
                self._sharing.setdefault((urgency, task.shares), {})[number] = task
        self._queue.put((urgency, number, task))

    def take(self) -> list[JudgeTask]:
        """The next task, and those that may share its fork, as many as leave no worker idle; empty: the end."""
        while True:
            urgency, number, task = self._queue.get()
            if task is None:
                return []
            if not task.shares:
                return [task]
            if together := self._taken(urgency, number, task):
                return together

    def end(self) -> None:
        """Let every worker end once nothing waits."""
        for _ in range(self._workers):
            self._queue.put((_LAST, next(self._numbers), None))

    def keep_apart(self, shares: str) -> None:
        """Have a fork each for the groups of a run and function, for a while."""
        with self._lock:
            if len(self._apart) >= _MOST_APART:
                self._apart.clear()
            self._apart[shares] = time.monotonic() + APART_SECONDS

    def _taken(self, urgency: int, number: int, task: JudgeTask) -> list[JudgeTask]:
        """This task and its companions; empty where it was another's."""
        with self._lock:
            waiting = self._sharing.get((urgency, task.shares), {})
            if number not in waiting:
                return []
            is_apart = self._apart.get(task.shares, 0.0) > time.monotonic()
            most = 1 if is_apart else min(MOST_GROUPS, -(-len(waiting) // self._workers))
            # The task itself always: nothing in the queue stands for it any more, whichever worker comes here first.
            found = [waiting.pop(number)]
            found += [waiting.pop(each) for each in list(itertools.islice(waiting, most - 1))]
            if not waiting:
                self._sharing.pop((urgency, task.shares), None)
            return found
