"""What a tenant's jobs get of a judge while another's take all they can, against the same jobs alone on half of it.

Groups of rollouts come from the stream, as those of jobs do. The other tenant is at its worst: twenty runs whose
programs hold a worker until they are stopped, a stream full of them before the first tenant's first one. Programs of
both wait and do not compute, so that turns are measured and not the machine.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.frame import Row, compare, run, within
from benchmarks.judge import serving_redis
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler, JudgeWorker
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import RunTenants
from spo.messaging.streams.entries import counted_append_words
from spo.testing.peers import wait_until
from spo.testing.runs import start_run
from spo.v1 import verdict_pb2
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory

# A guest's share of the machine, and so of its judge.
WORKERS = 2
GOAL = 0.9
SECONDS = 20.0
ROUNDS = 3
BEGINNING_SECONDS = 3.0
ENDLESS = "import time\ntime.sleep(1000)\n"
STOPPED_AFTER_SECONDS = 10.0
SHORT = "import time\ntime.sleep(0.05)\nprint(int(input()) + 1)\n"
PROGRAMS_OF_GROUP = 4
RUNS_OF_OTHER = 20
# More than is judged while it is measured.
GROUPS_OF_OTHER, GROUPS = 40, 2000


def measure() -> list[Row]:
    """The tenant's verdicts a minute beside the other, and alone on half of the workers; and how it begins."""
    firsts: list[float] = []

    def beside() -> float:
        judged, first = _judged(workers=WORKERS, beside=True)
        firsts.append(first)
        return judged

    shared = compare(
        "a tenant's verdicts beside another's endless programs",
        "per minute",
        "alone on half of the workers",
        beside,
        lambda: _judged(workers=WORKERS // 2, beside=False)[0],
        goal=GOAL,
        rounds=ROUNDS,
        warm_up=False,
    )
    first = within("its first verdicts", "s", lambda: firsts.pop(), limit=2 * STOPPED_AFTER_SECONDS, rounds=ROUNDS)
    return [shared, first]


def _judged(*, workers: int, beside: bool) -> tuple[float, float]:
    """Programs of tenant `b` that are judged a minute, in a stream that holds all of `a`'s before them, and how long
    the first take.
    """
    with serving_redis() as client, _judging(client, workers) as digest:
        if beside:
            for number in range(RUNS_OF_OTHER):
                _queue(client, f"job_A{number}", "a", ENDLESS, GROUPS_OF_OTHER, digest)
            # Its first programs have the workers.
            time.sleep(BEGINNING_SECONDS)
        _queue(client, "job_B", "b", SHORT, GROUPS, digest)
        began = time.monotonic()
        wait_until(lambda: _done(client) > 0, "the tenant's first programs are judged", 120)
        before, first_at = _done(client), time.monotonic()
        time.sleep(SECONDS)
        return 60 * (_done(client) - before) / (time.monotonic() - first_at), first_at - began


@contextmanager
def _judging(client: RedisClient, workers: int) -> Iterator[str]:
    """A judge as the service has it, and the digest of the tests that everything is judged by."""
    settings = Settings(recheck_rate=0, drain_seconds=0)
    scheduler = JudgeScheduler(client, settings, choose_tier(settings), workers, RunTenants(client).of)
    tests = [verdict_pb2.TestCase(stdin=b"1\n", stdout=b"2\n")]
    limits = verdict_pb2.Limits(cpu_seconds=STOPPED_AFTER_SECONDS, wall_seconds=STOPPED_AFTER_SECONDS)
    digest = scheduler.test_sets.upload(verdict_pb2.TestSet(tests=tests, limits=limits))
    stop = threading.Event()
    worker = threading.Thread(target=JudgeWorker(client, scheduler, "judge", settings), args=(stop,), daemon=True)
    worker.start()
    try:
        yield digest
    finally:
        stop.set()
        worker.join(30)
        scheduler.close(0)
        scheduler.interrupt()


def _queue(client: RedisClient, run_id: str, tenant: str, program: str, groups: int, digest: str) -> None:
    start_run(client, run_id)
    client.hset(redis_keys.job_record(run_id), "tenant", tenant)
    prompt = Prompt(prompt_id="p", language="python", response_format="raw", tests_digest=digest)
    with client.pipeline(transaction=False) as pipe:
        for number in range(groups):
            group_id = f"{run_id}-{number}"
            trajectories = [
                # Each its own program: none is known already.
                Trajectory(trajectory_id=f"{group_id}-{each}", response_text=f"{program}# {group_id} {each}")
                for each in range(PROGRAMS_OF_GROUP)
            ]
            group = RolloutGroup(
                request=PromptGroup(run_id=run_id, group_id=group_id, prompt=prompt), trajectories=trajectories
            )
            for words in counted_append_words(redis_keys.rollouts(), group.SerializeToString(), run_id):
                pipe.execute_command(*words)
        pipe.execute()


def _done(client: RedisClient) -> int:
    groups = (RolloutGroup.FromString(fields[b"payload"]) for _, fields in client.xrange(redis_keys.verdicts()))
    return sum(len(each.trajectories) for each in groups if each.request.run_id == "job_B")


SMOKE: dict[str, object] = {
    "ROUNDS": 1,
    "SECONDS": 3.0,
    "BEGINNING_SECONDS": 1.0,
    "STOPPED_AFTER_SECONDS": 1.0,
    "GROUPS": 100,
}


if __name__ == "__main__":
    sys.exit(run("tenants", measure, smoke=SMOKE))
