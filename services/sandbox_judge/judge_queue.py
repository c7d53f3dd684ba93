"""What waits for the workers of a judge, and whose turn it is: tenants share the workers, whatever each has waiting.

Programs cannot be interrupted for another tenant's, and the worst of them hold a worker as long as they are allowed
to. So a tenant does not only come first that has used the workers least: where several are there, none has more than
its part of the workers at once, so that another's next program finds one free and waits for no program of a stranger.
Within a tenant's share evaluations go first, then what came first.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from services.sandbox_judge.program_judge import JudgeOptions
from spo.v1.verdict_pb2 import TestSet, Verdict

# Groups that one fork scores at most.
MOST_GROUPS = 16
# For so long the groups of a run and function that spoilt a fork have one each.
APART_SECONDS = 60.0
_MOST_APART = 1000
# A tenant's part of the workers stays free for so long after its last program: between two rounds of samples of a
# prompt nothing of it waits here, and the next should not find every worker at another's endless loop.
KEPT_SECONDS = 10.0
# How often a worker looks whether a part that is kept free is so no more.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class JudgeTask:
    """One program waiting for its verdict, or several responses that are scored together.

    shares: the same text for groups that may be in one fork; empty: none may. tenant: whose share of the workers it is
    taken from, "" the operator's.
    """

    programs: tuple[str, ...]
    language: str
    test_set: TestSet
    options: JudgeOptions
    recheck: bool
    verdicts: tuple[Future[Verdict], ...]
    shares: str = ""
    tenant: str = ""


@dataclass(eq=False)
class TenantShare:
    """What a tenant has waiting, by urgency and arrival, and what it has of the workers."""

    # (urgency, arrival, task); those that share a fork may have been taken with another since.
    waiting: list[tuple[int, int, JudgeTask]] = field(default_factory=list)
    # When each worker that it has began.
    began: list[float] = field(default_factory=list)
    used_seconds: float = 0.0
    left_at: float = float("-inf")

    def is_there(self, now: float) -> bool:
        """Whether its part of the workers is its own: it has something here, or had just now."""
        return bool(self.waiting or self.began) or now - self.left_at < KEPT_SECONDS

    def used_by(self, now: float) -> float:
        """Seconds of workers that it has had since it came, those of now among them."""
        return self.used_seconds + sum(now - began for began in self.began)


class JudgeQueue:
    """Tasks by whose turn it is, then urgency, then arrival. Safe from several threads.

    A worker that is done with what it took says so: `done`.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._ready = threading.Condition()
        self._ended = False
        self._numbers = itertools.count()
        self._waiting = 0
        self._tenants: dict[str, TenantShare] = {}
        # Those that share, by arrival.
        self._sharing: dict[tuple[int, str], dict[int, JudgeTask]] = {}
        self._apart: dict[str, float] = {}

    def __len__(self) -> int:
        return self._waiting

    def room(self, tenant: str, most: int) -> int:
        """How many more of a tenant may wait, where `most` may in all: an equal part for each that has some waiting."""
        with self._ready:
            others = sum(bool(share.waiting) for name, share in self._tenants.items() if name != tenant)
            mine = self._tenants.get(tenant, TenantShare()).waiting
            return most // (others + 1) - len(mine)

    def put(self, urgency: int, task: JudgeTask) -> None:
        """Let a task wait; of a tenant's the least urgency goes first."""
        with self._ready:
            number = next(self._numbers)
            if task.shares:
                self._sharing.setdefault((urgency, task.shares), {})[number] = task
            heapq.heappush(self._present(task.tenant).waiting, (urgency, number, task))
            self._waiting += 1
            self._ready.notify()

    def take(self) -> list[JudgeTask]:
        """The next task, and those that may share its fork, as many as leave no worker idle; empty: the end."""
        with self._ready:
            while True:
                now = self._clock()
                share = self._next(now)
                if share is not None:
                    taken = self._taken(share)
                    share.began.append(now)
                    return taken
                if self._ended and not self._waiting:
                    self._ready.notify()
                    return []
                self._ready.wait(_LOOK_SECONDS if self._waiting else None)

    def done(self, tenant: str) -> None:
        """A worker that had taken something of a tenant is free again."""
        with self._ready:
            share, now = self._tenants[tenant], self._clock()
            # Whichever of the tenant's it was: the sum comes out the same.
            share.used_seconds += now - share.began.pop()
            share.left_at = now
            self._ready.notify()

    def end(self) -> None:
        """Let every worker end once nothing waits."""
        with self._ready:
            self._ended = True
            self._ready.notify_all()

    def keep_apart(self, shares: str) -> None:
        """Have a fork each for the groups of a run and function, for a while."""
        with self._ready:
            if len(self._apart) >= _MOST_APART:
                self._apart.clear()
            self._apart[shares] = self._clock() + APART_SECONDS

    def _present(self, tenant: str) -> TenantShare:
        """A tenant's share; one that comes, or comes back, is owed nothing for the time before."""
        now = self._clock()
        share = self._tenants.get(tenant)
        if share is None or not share.is_there(now):
            self._tenants = {name: each for name, each in self._tenants.items() if each.is_there(now)}
            least = min((each.used_by(now) for each in self._tenants.values()), default=0.0)
            share = self._tenants[tenant] = TenantShare(used_seconds=least)
        return share

    def _next(self, now: float) -> TenantShare | None:
        """Who gets the worker that is free: of those with less than their part, who has used the workers least."""
        there = [share for share in self._tenants.values() if share.is_there(now)]
        most = -(-self._workers // max(1, len(there)))
        having = [share for share in there if share.waiting and (len(there) == 1 or len(share.began) < most)]
        return min(having, key=lambda share: share.used_by(now), default=None)

    def _taken(self, share: TenantShare) -> list[JudgeTask]:
        """The tenant's first task and its companions, which wait no more."""
        urgency, number, task = heapq.heappop(share.waiting)
        found = [task]
        if task.shares:
            sharing = self._sharing[urgency, task.shares]
            is_apart = self._apart.get(task.shares, 0.0) > self._clock()
            most = 1 if is_apart else min(MOST_GROUPS, -(-len(sharing) // self._workers))
            del sharing[number]
            others = list(itertools.islice(sharing, most - 1))
            found += [sharing.pop(each) for each in others]
            if others:
                gone = set(others)
                share.waiting = [each for each in share.waiting if each[1] not in gone]
                heapq.heapify(share.waiting)
            if not sharing:
                del self._sharing[urgency, task.shares]
        self._waiting -= len(found)
        return found
