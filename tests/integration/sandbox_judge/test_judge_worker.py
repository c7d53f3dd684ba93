"""The judge's stage of the pipeline while the judge is in trouble, on a real server: nobody else pays for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import redis

from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import Batch, JudgeScheduler, JudgeWorker
from spo import redis_keys
from spo.errors import NotReady, ResourceExhausted
from spo.messaging.streams.entries import counted_append_words, publish
from spo.testing.peers import wait_until
from spo.testing.runs import RUN, start_run
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

GROUPS = 16
POISON = "print('a program that breaks the sandbox')"


SLOW_RUN = "job_SLOW"


class TroubledScheduler:
    """Accepts every program, apart from POISON, which breaks its sandbox; refuses all while it is full.

    Those of SLOW_RUN wait until `released`.
    """

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self.is_full = is_full
        self.released = threading.Event()
        self.refused = self.broken = 0

    def submit(self, programs: Sequence[str], *_: Any, run_id: str, **__: Any) -> Batch:
        if run_id == SLOW_RUN:
            self.released.wait(60)
        if self.is_full():
            self.refused += 1
            raise ResourceExhausted("4096 programs are waiting; try again later")
        futures: dict[str, Future[Verdict]] = {program: Future() for program in programs}
        for program, future in futures.items():
            if program == POISON:
                self.broken += 1
                future.set_exception(NotReady("the judge failed 3 times on this program", code="judge_fault"))
            else:
                future.set_result(Verdict(outcome=OUTCOME_ACCEPTED))
        return Batch(programs, futures, threading.Event())


def group(number: int, program: str, run_id: str = RUN) -> bytes:
    prompt = Prompt(prompt_id="prompt-1", language="python", response_format="raw")
    request = PromptGroup(run_id=run_id, group_id=f"g{number}", prompt=prompt)
    trajectories = [Trajectory(trajectory_id=f"t{number}", run_id=run_id, response_text=program)]
    return RolloutGroup(request=request, trajectories=trajectories).SerializeToString()


@contextmanager
def judging(client: redis.Redis, scheduler: TroubledScheduler) -> Iterator[None]:
    """Two judges that take all groups at once."""
    settings = Settings(reclaim_seconds=1.0, stream_groups=GROUPS)
    judge = cast(JudgeScheduler, scheduler)
    stop = threading.Event()
    workers = [JudgeWorker(client, judge, f"judge-{number}", settings) for number in range(2)]
    threads = [threading.Thread(target=worker, args=(stop,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


def entries_held(client: redis.Redis) -> int:
    groups = cast("list[dict[str, int]]", client.xinfo_groups(redis_keys.rollouts()))
    return sum(each["pending"] for each in groups)


def judged(client: redis.Redis) -> set[str]:
    found = [RolloutGroup.FromString(fields[b"payload"]) for _, fields in client.xrange(redis_keys.verdicts())]
    return {each.request.group_id for each in found}


def test_a_program_that_breaks_its_sandbox_holds_up_its_own_group_alone(redis_client: redis.Redis) -> None:
    start_run(redis_client)
    programs = [POISON if number == 2 else f"print({number})" for number in range(GROUPS)]
    publish(redis_client, redis_keys.rollouts(), [group(number, text) for number, text in enumerate(programs)])
    scheduler = TroubledScheduler(lambda: False)
    with judging(redis_client, scheduler):
        wait_until(lambda: len(judged(redis_client)) == GROUPS - 1, "the other groups are judged", 5)
        wait_until(lambda: scheduler.broken > 5, "more tries than were once allowed", 30)

    assert judged(redis_client) == {f"g{number}" for number in range(GROUPS) if number != 2}
    assert redis_client.xlen(redis_keys.rollouts()) == 1
    assert redis_client.xlen(redis_keys.dead_letters(redis_keys.rollouts())) == 0


def test_a_judge_that_is_full_for_a_while_judges_every_group_afterwards(redis_client: redis.Redis) -> None:
    start_run(redis_client)
    publish(redis_client, redis_keys.rollouts(), [group(number, f"print({number})") for number in range(GROUPS)])
    has_room_at = time.monotonic() + 3.0
    scheduler = TroubledScheduler(lambda: time.monotonic() < has_room_at)
    with judging(redis_client, scheduler):
        wait_until(lambda: len(judged(redis_client)) == GROUPS, "every group is judged", 20)

    assert scheduler.refused >= GROUPS
    assert redis_client.xlen(redis_keys.dead_letters(redis_keys.rollouts())) == 0


def test_a_run_whose_programs_are_slow_holds_up_no_others_groups(redis_client: redis.Redis) -> None:
    start_run(redis_client)
    start_run(redis_client, SLOW_RUN)
    for number in range(5 * GROUPS):
        for words in counted_append_words(redis_keys.rollouts(), group(number, "print(1)", SLOW_RUN), SLOW_RUN):
            redis_client.execute_command(*words)
    for words in counted_append_words(redis_keys.rollouts(), group(1000, "print(1)"), RUN):
        redis_client.execute_command(*words)
    scheduler = TroubledScheduler(lambda: False)
    with judging(redis_client, scheduler):
        wait_until(lambda: judged(redis_client) == {"g1000"}, "the group of the other run is judged", 10)
        scheduler.released.set()
        wait_until(lambda: len(judged(redis_client)) == 5 * GROUPS + 1, "the others follow", 30)

    assert redis_client.xlen(redis_keys.verdicts()) == 5 * GROUPS + 1, "each once"


def test_what_an_environment_has_decided_is_not_judged_again(redis_client: redis.Redis) -> None:
    start_run(redis_client)
    decided = Trajectory(trajectory_id="t1", run_id=RUN, response_text=POISON)
    decided.verdict.CopyFrom(Verdict(outcome=OUTCOME_WRONG_ANSWER, detail="the game is lost"))
    request = PromptGroup(run_id=RUN, group_id="g0", prompt=Prompt(prompt_id="prompt-1"))
    undecided = Trajectory(trajectory_id="t0", run_id=RUN, response_text="print(0)")
    both = RolloutGroup(request=request, trajectories=[undecided, decided])
    alone = RolloutGroup(request=request, trajectories=[decided])
    payloads = [both.SerializeToString(), alone.SerializeToString()]
    publish(redis_client, redis_keys.rollouts(), payloads)
    with judging(redis_client, TroubledScheduler(lambda: False)):
        wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == len(payloads), "both groups are judged", 20)

    found = [RolloutGroup.FromString(fields[b"payload"]) for _, fields in redis_client.xrange(redis_keys.verdicts())]
    seen = {(each.trajectory_id, each.verdict.detail, each.reward) for group in found for each in group.trajectories}
    assert seen == {("t0", "", 0.0), ("t1", "the game is lost", -1.0)}


class SlowScheduler:
    """Whose verdicts never come."""

    def submit(self, programs: Sequence[str], *_: Any, **__: Any) -> Batch:
        return Batch(programs, {program: Future() for program in programs}, threading.Event())


def test_a_judge_that_stops_gives_back_what_it_cannot_judge_any_more_within_its_grace(
    redis_client: redis.Redis,
) -> None:
    start_run(redis_client)
    publish(redis_client, redis_keys.rollouts(), [group(number, f"print({number})") for number in range(GROUPS)])
    settings = Settings(reclaim_seconds=600, drain_seconds=2.0, stream_groups=4)
    stop = threading.Event()
    first = JudgeWorker(redis_client, cast(JudgeScheduler, SlowScheduler()), "first", settings)
    thread = threading.Thread(target=first, args=(stop,), daemon=True)
    thread.start()
    try:
        wait_until(lambda: entries_held(redis_client) >= 8, "it has some in hand", 10)
    finally:
        stop.set()
    thread.join(4.0)

    assert not thread.is_alive()
    with judging(redis_client, TroubledScheduler(lambda: False)):
        wait_until(lambda: len(judged(redis_client)) == GROUPS, "another judge has them at once", 20)
