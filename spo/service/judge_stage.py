"""The judges' stage of the pipeline: rollout groups in, the same groups with verdicts and rewards out.

Every pool of judges is one: it says which stream it reads and who decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.run_specs import RunSpecs
from spo.messaging.streams import Consumer, Entry, consume
from spo.observability import tracing
from spo.service.process import keep_alive_while
from spo.spec.job_spec import RewardSpec
from spo.spec.reward import needs_all_tests, reward_of
from spo.tasks.problem import has_verdict, program_of
from spo.v1.judge_service_pb2 import Priority
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import Verdict


class AwaitedVerdicts(Protocol):
    """The verdicts on the programs of one request, once they are there."""

    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]: ...


class NoVerdicts:
    """What awaits nothing, since an environment has decided about every response."""

    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]:
        """None."""
        return []


class Deciding(Protocol):
    """Who decides about programs: a scheduler with its queue."""

    def submit(
        self,
        programs: Sequence[str],
        language: str,
        tests_digest: str,
        priority: Priority.ValueType,
        *,
        want_details: bool = False,
        run_id: str = "",
    ) -> AwaitedVerdicts: ...


@dataclass(frozen=True)
class JudgedEntry:
    """A stream entry and the verdicts on its programs."""

    entry: Entry
    group: RolloutGroup
    batch: AwaitedVerdicts
    span: tracing.Span


class JudgeStage:
    """Judges rollout groups from a stream; call it with a stop event. `service` is the hop's name."""

    def __init__(self, service: str, consumer: Consumer, scheduler: Deciding, groups_at_once: int) -> None:
        self.service = service
        self.consumer = consumer
        self.scheduler = scheduler
        self.groups_at_once = groups_at_once
        self.specs = RunSpecs(consumer.client)

    def __call__(self, stop: threading.Event) -> None:
        consume(self.consumer, self._judge, stop, count=self.groups_at_once)

    def _judge(self, entries: list[Entry]) -> None:
        """Judge the groups of these entries side by side; what goes wrong with one holds up no other."""
        with keep_alive_while(lambda: self.consumer.keep_alive(entries), self.consumer.reclaim_after_seconds / 4):
            judged: list[JudgedEntry] = []
            for entry in entries:
                with self.consumer.isolated(entry):
                    judged.append(self._begin(entry))
            for one in judged:
                with self.consumer.isolated(one.entry):
                    self._forward(one)

    def _begin(self, entry: Entry) -> JudgedEntry:
        group = _decode(entry)
        return JudgedEntry(entry, group, self._submit(group), _span(entry, group))

    def _forward(self, judged: JudgedEntry) -> None:
        self._set_verdicts(judged.group, judged.batch)
        payload = judged.group.SerializeToString()
        self.consumer.forward(judged.entry, redis_keys.verdicts(), payload, judged.span.header)
        judged.span.end()

    def _submit(self, group: RolloutGroup) -> AwaitedVerdicts:
        prompt = group.request.prompt
        programs = [program_of(trajectory, prompt.response_format, prompt.language) for trajectory in _undecided(group)]
        if not programs:
            return NoVerdicts()
        return self._decide(group, programs)

    def _decide(self, group: RolloutGroup, programs: Sequence[str]) -> AwaitedVerdicts:
        prompt = group.request.prompt
        return self.scheduler.submit(
            programs,
            prompt.language,
            prompt.tests_digest,
            Priority.PRIORITY_TRAINING,
            want_details=needs_all_tests(self._reward(group)),
            run_id=group.request.run_id,
        )

    def _set_verdicts(self, group: RolloutGroup, batch: AwaitedVerdicts) -> None:
        reward = self._reward(group)
        for trajectory, verdict in zip(_undecided(group), batch.verdicts(), strict=True):
            trajectory.verdict.CopyFrom(verdict)
        for trajectory in group.trajectories:
            # The counts say enough; a trajectory stays small.
            del trajectory.verdict.tests[:]
            trajectory.reward = reward_of(trajectory.verdict, reward)
            trajectory.hops.add(service=self.service, at_unix_ms=int(time.time() * 1000))

    def _reward(self, group: RolloutGroup) -> RewardSpec:
        return self.specs.of(group.request.run_id).tasks.reward


def _undecided(group: RolloutGroup) -> list[Trajectory]:
    """The trajectories about which no environment has decided."""
    return [trajectory for trajectory in group.trajectories if not has_verdict(trajectory)]


def _decode(entry: Entry) -> RolloutGroup:
    try:
        return RolloutGroup.FromString(entry.payload)
    except DecodeError as error:
        raise InvalidInput(f"not a RolloutGroup: {error}") from error


def _span(entry: Entry, group: RolloutGroup) -> tracing.Span:
    if not entry.trace:
        return tracing.Span()
    request = group.request
    programs = len(group.trajectories)
    return tracing.begin(
        "judge", parent=entry.trace, kind="CONSUMER", run=request.run_id, group=request.group_id, programs=programs
    )
