"""Pivotal Token Search as a service (paper 3.1.3): where along a response does pi0's chance of success change?

    stream `pivotal` -> a prompt's stored correct trajectories -> bisect by rollouts of pi0 from their prefixes
                     -> the same trajectories with annotations, into the replay buffer as source `annotated`

The ends of a search cost nothing: S_0 is the prompt's value, and a finished correct response succeeds for certain.
Resumable by prefix: labels are kept under a digest that outlives the run, so a killed worker's successor, or a later
run with the same reference, repeats no rollout that was counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.value_estimation import redis_keys as own_keys
from services.value_estimation.reference import Reference, References
from services.value_estimation.samples import SampleMaker
from services.value_estimation.service_clients import ServiceClients
from services.value_estimation.settings import Settings
from services.value_estimation.stream_workers import decoded, is_wanted, work_through
from spo import redis_keys
from spo.algorithm.pivotal_tokens import next_positions
from spo.errors import InvalidInput, NotReady
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_status import write_of_run
from spo.messaging.streams import depth
from spo.observability import metrics
from spo.spec.job_spec import JobSpec, PivotalSpec, ValueSpec
from spo.spec.reward import has_succeeded
from spo.v1.prompt_pb2 import SOURCE_ANNOTATED, Prompt, Sampling, Source
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Annotation, Hop, Trajectory
from spo.v1.value_pb2 import PivotalRequest, PromptValue

IDLE_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RolloutCount:
    """`successes` of `rollouts` from a prefix."""

    rollouts: int
    successes: int

    @property
    def rate(self) -> float:
        return self.successes / self.rollouts


@dataclass(frozen=True)
class Search:
    """What the searches in the trajectories of one prompt share; `start` is the count of the empty prefix."""

    prompt: Prompt
    spec: JobSpec
    value: ValueSpec
    pivotal: PivotalSpec
    maker: SampleMaker
    judge_version: str
    start: RolloutCount | None

    def labels_digest(self, trajectory: Trajectory) -> str:
        """The digest of everything that a trajectory's labels depend on; they are stored under it."""
        value, chat = self.value, self.spec.model.chat_format.address
        return redis_keys.digest(
            self.maker.reference.model_hash,
            self.prompt.prompt_id,
            self.prompt.tests_digest,
            self.spec.tasks.reward.model_dump_json(),
            f"T={value.temperature:g} p={value.top_p:g} n={self.spec.model.max_response_tokens}"
            + (f" chat={chat}" if chat else ""),
            self.judge_version,
            str(list(trajectory.response_token_ids)),
        )


@dataclass
class PivotalWorker:
    """Searches prompts_in_flight prompts at once."""

    client: RedisClient
    references: References
    clients: ServiceClients
    settings: Settings
    name: str

    def run(self, stop: threading.Event) -> None:
        """Work until stop is set."""
        stream, name = redis_keys.pivotal(), f"{self.name}-pivotal"
        work_through(
            self.client,
            stream,
            name,
            self.settings,
            lambda raw: self.annotate(decoded(PivotalRequest, raw), stop),
            stop,
        )

    def annotate(self, request: PivotalRequest, stop: threading.Event) -> None:
        """Annotate a prompt's trajectories and store that it is done; nothing when it is, or is no longer wanted.

        Raises NotReady when a service was away too long, or when stop came first, and InvalidInput (code
        "prefix_of_conversation") for a prompt that an environment answers.
        """
        run_id, prompt = request.run_id, request.prompt
        if not is_wanted(self.client, run_id) or self.client.hexists(redis_keys.run_pivotal(run_id), prompt.prompt_id):
            return
        spec = self.references.spec(run_id)
        if spec.value is None or spec.value.pivotal is None:
            raise InvalidInput(f"run {run_id} asks for no pivotal tokens", code="not_asked_for")
        if prompt.environment:
            # Nobody waits for it: the other prompts' searches count.
            write_of_run(self.client, run_id, ("HSET", redis_keys.run_pivotal(run_id), prompt.prompt_id, 0))
            raise InvalidInput(
                f"prompt {prompt.prompt_id} is answered in the environment {prompt.environment!r}, which cannot go on "
                "from a prefix: there is no search for pivotal tokens",
                code="prefix_of_conversation",
            )
        try:
            if spec.value.pivotal.when == "idle":
                self._await_idle(run_id, stop)
            search = self._search(run_id, prompt, spec, spec.value, spec.value.pivotal, self.references.of(run_id))
            done = [self._annotated(search, trajectory) for trajectory in self._trajectories(search)]
        except NotReady:
            # The replicas of an ended run serve another one: waiting would be in vain.
            if is_wanted(self.client, run_id):
                raise
            return
        write_of_run(self.client, run_id, ("HSET", redis_keys.run_pivotal(run_id), prompt.prompt_id, sum(done)))

    def _search(
        self, run_id: str, prompt: Prompt, spec: JobSpec, value: ValueSpec, pivotal: PivotalSpec, reference: Reference
    ) -> Search:
        clients = replace(self.clients, wanted=lambda: is_wanted(self.client, run_id))
        maker = SampleMaker(run_id, reference, clients, spec.tasks.reward)
        stored = self.client.hget(redis_keys.run_values(run_id), prompt.prompt_id)
        known = PromptValue.FromString(stored or b"")
        start = RolloutCount(known.samples, known.successes) if known.samples else None
        return Search(prompt, spec, value, pivotal, maker, maker.clients.judge_version(prompt), start)

    def _trajectories(self, search: Search) -> list[Trajectory]:
        """The finished correct trajectories to search, ordered by the digests of their labels."""
        found: dict[str, Trajectory] = {}
        for source in search.pivotal.sources:
            code = Source.Value(f"SOURCE_{source.upper()}")
            for sample in search.maker.clients.stored_samples(search.maker.run_id, search.prompt.prompt_id, code):
                # The rollouts of a search are not searched themselves.
                # Nor are conversations, which no rollout can take up in the middle.
                searched = not (sample.group_id.startswith("pivotal-") or sample.segments)
                if has_succeeded(sample, search.spec.tasks.reward) and searched:
                    found.setdefault(search.labels_digest(sample), sample)
        finished = {digest: sample for digest, sample in found.items() if sample.finish_reason == FINISH_REASON_STOP}
        return [finished[digest] for digest in sorted(finished)[: search.pivotal.trajectories_per_prompt]]

    def _annotated(self, search: Search, trajectory: Trajectory) -> bool:
        """Search one trajectory and store it with its labels; False when the budget allowed no rollout."""
        labels = search.labels_digest(trajectory)
        length = len(trajectory.response_token_ids)
        counts = {length: RolloutCount(1, 1)} | ({0: search.start} if search.start else {})
        counts |= {} if search.pivotal.keep_rollouts else self._known(labels)
        visited = sum(0 < position < length for position in counts)
        while visited < search.pivotal.positions_per_trajectory:
            rates = {position: count.rate for position, count in counts.items()}
            room = search.pivotal.positions_per_trajectory - visited
            positions = next_positions(length, rates, threshold=search.pivotal.threshold, limit=room)
            affordable = [position for position in positions if self._reserve(search, labels, position)]
            for position in affordable:
                counts[position] = self._roll_out(search, trajectory, labels, position)
            visited += len(affordable)
            if len(affordable) < len(positions) or not positions:
                break
        inner = {position: count for position, count in counts.items() if 0 < position < length}
        if not inner:
            return False
        search.maker.clients.append(search.maker.run_id, [_with_annotations(search.maker.run_id, trajectory, counts)])
        return True

    def _known(self, labels: str) -> dict[int, RolloutCount]:
        stored = self.client.hgetall(own_keys.pivotal_labels(labels))
        pairs = {int(position): text.split(b":") for position, text in stored.items()}
        return {
            position: RolloutCount(int(rollouts), int(successes)) for position, (rollouts, successes) in pairs.items()
        }

    def _reserve(self, search: Search, labels: str, position: int) -> bool:
        """Whether the budget allows rollouts from this prefix; a prefix counts once, however often it is asked for."""
        run_id = search.maker.run_id
        key, member = redis_keys.pivotal_visits(run_id), f"{labels}:{position}"
        if write_of_run(self.client, run_id, ("SADD", key, member)) and (
            self.client.scard(key) * search.pivotal.rollouts > search.pivotal.budget_rollouts
        ):
            self.client.srem(key, member)
            return False
        return True

    def _roll_out(self, search: Search, trajectory: Trajectory, labels: str, position: int) -> RolloutCount:
        value, rollouts = search.value, search.pivotal.rollouts
        sampling = Sampling(
            samples=rollouts,
            temperature_min=value.temperature,
            temperature_max=value.temperature,
            top_p=value.top_p,
            max_tokens=search.spec.model.max_response_tokens,
            seed=int(redis_keys.digest(labels, str(position))[:15], 16),
        )
        prefix = trajectory.response_token_ids[:position]
        found = search.maker.sample_reference(
            search.prompt, sampling, f"pivotal-{labels[:16]}-{position}", prefix=prefix
        )
        metrics.PIVOTAL_ROLLOUTS.inc(len(found))
        if search.pivotal.keep_rollouts:
            search.maker.clients.append(search.maker.run_id, found)
        count = RolloutCount(len(found), sum(has_succeeded(rollout, search.spec.tasks.reward) for rollout in found))
        self.client.hset(own_keys.pivotal_labels(labels), str(position), f"{count.rollouts}:{count.successes}")
        return count

    def _await_idle(self, run_id: str, stop: threading.Event) -> None:
        """Wait until no prompt group waits for the engines. Raises NotReady once the run is not wanted any more."""
        while True:
            waiting = depth(self.client, redis_keys.prompts(run_id), redis_keys.INFERENCE_GROUP)
            if not is_wanted(self.client, run_id) or stop.is_set():
                raise NotReady(f"run {run_id} had no idle moment left")
            if waiting.lag + waiting.pending == 0:
                return
            stop.wait(IDLE_POLL_SECONDS)


def _with_annotations(run_id: str, trajectory: Trajectory, counts: Mapping[int, RolloutCount]) -> Trajectory:
    annotated = Trajectory()
    annotated.CopyFrom(trajectory)
    annotated.source = SOURCE_ANNOTATED
    annotated.trajectory_id = redis_keys.trajectory_id(run_id, f"annotated/{trajectory.trajectory_id}", 0, 0, 0)
    del annotated.annotations[:]
    annotated.annotations.extend(
        Annotation(position=position, rollouts=counts[position].rollouts, successes=counts[position].successes)
        for position in sorted(counts)
    )
    annotated.hops.append(Hop(service="value-estimation", at_unix_ms=int(time.time() * 1000)))
    return annotated
