"""An 8 B model on 8 cards and 70 B on 64, hours of them on a virtual clock: the share of time that each side works.

The dispatcher, the limiter, the streams and the replay buffer with its window of versions are the platform's own, over
a real Redis. Engines and trainer are numbers of `spo plan`'s pace, which no card has confirmed: an engine's pass reads
its weights and the cache of what it decodes, the trainer takes its operations; cards are divided by whole ranks and
replicas so that both are about as fast. A response keeps its cache when new weights come and is as old as its first
token. Not here: judges, reference log-probs, faults, and whether it all fits into the cards (`spo plan` says).
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.frame import Row, run
from benchmarks.peers.pipeline import redis_server, running_job
from benchmarks.peers.simulated_cluster import SPEC
from services.orchestrator.datasets import TaskLibrary
from services.orchestrator.dispatch import PromptDispatcher
from services.orchestrator.jobs import IN_REDIS, JobStore
from services.orchestrator.replicas import GroupsInHand, LiveReplica
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import NotReady
from spo.messaging.redis_client import RedisClient, connect
from spo.messaging.streams.entries import Entry
from spo.messaging.streams.stage import Consumer
from spo.observability import configure_logs
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.plan import (
    MOST_SEQUENCES,
    WIDTHS,
    Device,
    inference_memory,
    named_shape,
    push_bytes,
    training_tokens,
)
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse, SampleBatchRequest
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

DEVICE = Device()
# Bytes per second: what a rank copies of a version into host memory while its trainer waits, what a node stores of that
# copy while training goes on, and what a replica loads.
COPIED, PUBLISHED, LOADED = 1e10, 4e9, 2e10
CARDS_OF_A_NODE = 8
UPDATE_INTERVAL, MOST_AGE = 4, 4
# How often a trajectory is learned from: once, so that the engines must make all that the trainer takes.
SERVED = 1.0
SPREAD = 0.8
BUSY = 0.85
# Steps that fill the pipeline, and steps that count.
WARM_STEPS, STEPS = 12, 24
# Ticks of a step: what happens within one is not told apart.
TICKS = 20


@dataclass(frozen=True)
class Load:
    """A model, its cards, and how long its responses are (tokens)."""

    shape: str
    cards: int
    batch: int
    mean: int
    longest: int

    @property
    def name(self) -> str:
        return f"{self.shape} on {self.cards}, {self.mean // 1000} k tokens, {self.longest // 1000} k at most"

    def length(self, draw: random.Random) -> int:
        """Of a response; the longest are cut, so that the mean is a little less than the load's."""
        logarithm = draw.gauss(math.log(self.mean) - SPREAD**2 / 2, SPREAD)
        return max(16, min(self.longest, int(math.exp(logarithm))))

    @property
    def held(self) -> float:
        """Tokens of a sequence that an engine meets: the long ones are met longer, each half done in the mean."""
        draw = random.Random(0)
        lengths = [self.length(draw) for _ in range(20_000)]
        return sum(length**2 for length in lengths) / sum(lengths) / 2


LOADS = [
    Load("llama-3-8b", 8, 560, 2_000, 8_000),
    Load("llama-3-8b", 8, 560, 8_000, 32_000),
    Load("llama-3-70b", 64, 576, 2_000, 8_000),
    Load("llama-3-70b", 64, 576, 8_000, 32_000),
]


@dataclass(frozen=True)
class Pace:
    """How the cards are divided, and what each side does with its own."""

    ranks: int
    replicas: int
    tensor_parallel: int
    # Of an engine.
    slots: int
    weights: float
    cache_of_a_token: float
    # Tokens a second, of all.
    trained: float
    sampled: float

    @staticmethod
    def of(load: Load, spec: JobSpec) -> Pace:
        """The division whose slower side is the fastest."""
        node = min(CARDS_OF_A_NODE, load.cards) if load.cards > CARDS_OF_A_NODE else 1
        held = load.held
        divisions = [
            Pace._divided(load, spec, ranks, width, held)
            for ranks, width in itertools.product(range(node, load.cards, node), WIDTHS)
            if load.batch % ranks == 0 and (load.cards - ranks) % width == 0
        ]
        return max(divisions, key=lambda pace: min(pace.trained, pace.sampled))

    @staticmethod
    def _divided(load: Load, spec: JobSpec, ranks: int, width: int, held: float) -> Pace:
        shape, replicas = named_shape(load.shape), (load.cards - ranks) // width
        memory = inference_memory(spec, shape, DEVICE.memory_bytes, width)
        cache = 2 * 2 * shape.layers * max(1, shape.kv_heads // width) * shape.head_size
        # A tenth stays free, since not all are as long as the mean.
        slots = min(MOST_SEQUENCES, int(0.9 * memory.kv_cache / (cache * held)))
        read = memory.weights + slots * cache * held
        sampled = replicas * slots * DEVICE.reading_share * DEVICE.bandwidth / read
        trained = training_tokens(spec, shape, DEVICE, ranks)
        return Pace(ranks, replicas, width, slots, memory.weights, cache, trained, sampled)

    def tokens(self, held: int, seconds: float, sequences: int) -> float:
        """Tokens that each sequence of an engine gains."""
        read = self.weights + self.cache_of_a_token * held
        return seconds * DEVICE.reading_share * DEVICE.bandwidth / read if sequences else 0.0


@dataclass
class Response:
    """One sequence of a group, and the version that made its first token."""

    length: int
    done: float = 0.0
    first: int = -1


@dataclass
class Group:
    """A prompt that a replica has in hand."""

    entry: Entry
    request: PromptGroup
    responses: list[Response] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return all(each.done >= each.length for each in self.responses)


@dataclass
class Engine:
    """An inference replica: sequences that it decodes side by side, and those that wait for a slot."""

    pace: Pace
    version: int = 0
    groups: list[Group] = field(default_factory=list)
    waiting: list[Response] = field(default_factory=list)
    running: list[Response] = field(default_factory=list)
    made: float = 0.0
    loading: float = 0.0
    idle_seconds: float = 0.0

    def decode(self, seconds: float) -> list[Group]:
        """Let time pass; returns the groups that are whole."""
        loading = min(seconds, self.loading)
        self.loading -= loading
        seconds -= loading
        free = self.pace.slots - len(self.running)
        for response in self.waiting[:free]:
            response.first = self.version
        self.running += self.waiting[:free]
        del self.waiting[:free]
        if not self.running:
            self.idle_seconds += seconds
        held = int(sum(each.done for each in self.running))
        gained = self.pace.tokens(held, seconds, len(self.running))
        for response in self.running:
            self.made += min(gained, response.length - response.done)
            response.done += gained
        self.running = [each for each in self.running if each.done < each.length]
        whole = [group for group in self.groups if group.is_whole]
        self.groups = [group for group in self.groups if not group.is_whole]
        return whole


class VirtualCluster:
    """One job on its cards; the methods of the replay service that the dispatcher and the trainer call are real."""

    def __init__(self, client: RedisClient, load: Load, document: dict[str, Any]) -> None:
        self.load, self.run_id = load, running_job(client, document)
        jobs = JobStore(client, durable=IN_REDIS)
        self.spec = jobs.spec(self.run_id)
        self.pace = Pace.of(load, self.spec)
        self.engines = [Engine(self.pace) for _ in range(self.pace.replicas)]
        self.store = ReplayStore(client)
        self.sampler = BatchSampler(self.store)
        self.service = ReplayService(self.sampler)
        self.consumer = Consumer(client, redis_keys.prompts(self.run_id), redis_keys.INFERENCE_GROUP, "virtual")
        self.in_hand = GroupsInHand(self._live, lambda: self.now)
        self.dispatcher = PromptDispatcher(jobs, TaskLibrary(), self, 4, self.in_hand)  # type: ignore[arg-type]
        self.draw = random.Random(0)
        self.lengths: dict[str, int] = {}
        self.now, self.version, self.step = 0.0, 0, 0
        # Seconds that the trainer still works, copies what it publishes, and has done of each.
        self.left, self.publishing = 0.0, 0.0
        self.worked, self.published = 0.0, 0.0
        self.ages: list[int] = []
        self.inserted = 0
        # Groups that nobody has taken; an empty stream is not read, since that would wait for real.
        self.queued = 0
        model = push_bytes(self.spec, named_shape(load.shape))
        nodes = max(1, self.pace.ranks // CARDS_OF_A_NODE)
        self.copy_seconds, self.load_seconds = model / self.pace.ranks / COPIED, model / LOADED
        self.store_seconds = model / nodes / PUBLISHED
        # When the version that is being stored is announced.
        self.stored_at = math.inf

    def call(self, method: str, request: GetReplayStatusRequest, deadline_seconds: float) -> GetReplayStatusResponse:
        """The dispatcher's question, answered by the real service."""
        assert method == "GetReplayStatus"
        return self.service.GetReplayStatus(request, None)  # type: ignore[arg-type]

    def until(self, step: int) -> None:
        """Let time pass until the trainer has taken so many steps. Raises RuntimeError where it never will."""
        tick = self.load.batch * self.load.mean / min(self.pace.trained, self.pace.sampled) / TICKS
        limit = self.now + 20 * TICKS * tick * max(1, step - self.step)
        while self.step < step:
            if self.now > limit:
                raise RuntimeError(f"after {self.now:.0f} s still at step {self.step}")
            self.now += tick
            if self.now >= self.stored_at:
                self._announce()
            self.queued += self.dispatcher.dispatch(self.run_id)
            self._hand_out()
            for engine in self.engines:
                for group in engine.decode(tick):
                    self._insert(group, engine.version)
            self._train(tick)

    def _hand_out(self) -> None:
        most = self.in_hand.of(self.run_id) or 2 * self.pace.slots
        for engine in self.engines:
            room = min(most - len(engine.groups), self.queued)
            for entry in self.consumer.read(room, 0.001) if room > 0 else []:
                self.queued -= 1
                group = Group(entry, PromptGroup.FromString(entry.payload))
                group.responses = [Response(self.load.length(self.draw)) for _ in range(group.request.sampling.samples)]
                engine.groups.append(group)
                engine.waiting += group.responses

    def _insert(self, group: Group, last: int) -> None:
        found = [self._trajectory(group, index, last) for index in range(len(group.responses))]
        self.store.append(self.run_id, found)
        self.consumer.finish([group.entry])
        self.inserted += len(found)

    def _trajectory(self, group: Group, index: int, last: int) -> Trajectory:
        request, response = group.request, group.responses[index]
        right = self.draw.random() < 0.5
        name = redis_keys.trajectory_id(self.run_id, request.group_id, index, 0, last)
        self.lengths[name] = response.length
        return Trajectory(
            trajectory_id=name,
            group_id=request.group_id,
            run_id=self.run_id,
            prompt_id=request.prompt.prompt_id,
            sample_index=index,
            source=SOURCE_ONLINE,
            # Of the length only the number counts here.
            prompt_token_ids=[1],
            response_token_ids=[self.draw.randrange(2**20) for _ in range(2)],
            sampling_logprobs=[-1.0, -1.0],
            reference_logprobs=[-1.0, -1.0],
            response_text=f"{name} {right}",
            verdict=Verdict(outcome=OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER),
            reward=float(right) - 1,
            policy_version_first=response.first,
            policy_version_last=last,
            created_unix_ms=1_700_000_000_000 + int(1000 * self.now),
            reference_hash="f" * 64,
        )

    def _train(self, seconds: float) -> None:
        while seconds > 1e-9:
            if self.publishing > 0:
                used = min(seconds, self.publishing)
                self.publishing -= used
                self.published += used
                seconds -= used
                continue
            if self.left <= 0 and not self._take():
                return
            used = min(seconds, self.left)
            self.left -= used
            self.worked += used
            seconds -= used
            if self.left <= 1e-9:
                self.left = 0.0
                self.step += 1
                if self.step % self.spec.trainer.update_interval == 0:
                    self._publish(seconds)

    def _publish(self, left: float) -> None:
        """The trainer waits for the copy, and before it for the version that is still being stored."""
        now = self.now - left
        wait = 0.0
        if self.stored_at < math.inf:
            wait = max(0.0, self.stored_at - now)
            self._announce()
        self.publishing = wait + self.copy_seconds
        self.stored_at = now + self.publishing + self.store_seconds

    def _take(self) -> bool:
        """The batch of the next step, whose tokens are the trainer's work."""
        size = self.load.batch
        request = SampleBatchRequest(
            run_id=self.run_id, batch_size=size, step=self.step, policy_version=self.version, wait_seconds=0
        )
        try:
            batch = [Trajectory.FromString(each.payload) for each in self.sampler.sample(request)]
        except NotReady:
            return False
        self.ages += [self.version - each.policy_version_first for each in batch]
        self.left = sum(self.lengths[each.trajectory_id] for each in batch) / self.pace.trained
        return True

    def _announce(self) -> None:
        self.version, self.stored_at = self.version + 1, math.inf
        for engine in self.engines:
            engine.version, engine.loading = self.version, self.load_seconds

    def _live(self) -> list[LiveReplica]:
        return [
            LiveReplica(f"r{index}", "inference", "", 0, self.run_id, 0, 0.0, False, "", frozenset(), (), False, "", 0)
            for index in range(len(self.engines))
        ]


def document_of(load: Load) -> dict[str, Any]:
    """The job's spec."""
    return SPEC | {
        "model": {"path": "/pi0", "max_prompt_tokens": 256, "max_response_tokens": load.longest},
        "trainer": {"batch_size": load.batch, "update_interval": UPDATE_INTERVAL, "checkpoint_interval": 100},
        "replay": SPEC["replay"] | {"max_staleness": MOST_AGE, "samples_per_insert": SERVED},
    }


@contextmanager
def cluster_of(load: Load) -> Iterator[VirtualCluster]:
    """The cluster of a load, over a Redis of its own."""
    document = document_of(load)
    parse_job_spec(document)
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder, redis_server(Path(folder)) as (url, _):
        yield VirtualCluster(connect(url), load, document)


def undisturbed(pace: Pace, load: Load, seconds: float) -> float:
    """Tokens a second of an engine that never waits for a prompt and never loads weights."""
    engine, draw = Engine(pace), random.Random(1)
    ticks, made = STEPS * TICKS, 0.0
    for number in range(2 * ticks):
        while len(engine.waiting) < pace.slots:
            engine.waiting.append(Response(load.length(draw)))
        engine.decode(seconds / ticks)
        made = engine.made if number == ticks - 1 else made
    return (engine.made - made) / seconds


def measure() -> list[Row]:
    """Of each load what both sides did of what they could, and how old what was learned from is."""
    configure_logs("benchmark", "error")
    return [row for load in LOADS for row in _rows(load)]


def _rows(load: Load) -> Iterator[Row]:
    with cluster_of(load) as cluster:
        cluster.until(WARM_STEPS)
        began, worked, published = cluster.now, cluster.worked, cluster.published
        made, idle = (sum(getattr(each, name) for each in cluster.engines) for name in ("made", "idle_seconds"))
        cluster.ages.clear()
        cluster.until(WARM_STEPS + STEPS)
    seconds, pace = cluster.now - began, cluster.pace
    made = sum(each.made for each in cluster.engines) - made
    idle = sum(each.idle_seconds for each in cluster.engines) - idle
    full = pace.replicas * undisturbed(pace, load, seconds)
    parts = f"{pace.ranks} ranks, {pace.replicas} replicas of {pace.tensor_parallel}"
    print(
        f"{load.name}: {parts}; a step {seconds / STEPS:.0f} s, trainer publishes "
        f"{(cluster.published - published) / seconds:.1%}; {made / seconds:,.0f} tokens/s made of "
        f"{full:,.0f}; the trainer could take {pace.trained:,.0f}",
        file=sys.stderr,
    )
    yield _share(f"{load.name}: trainer works", (cluster.worked - worked) / seconds, parts)
    yield _share(f"{load.name}: engines have something to decode", 1 - idle / seconds / pace.replicas, parts)
    # Cards are whole: the faster side has time left, whatever the platform does.
    yield _share(
        f"{load.name}: tokens of what the slower side could do", made / seconds / min(full, pace.trained), parts
    )
    oldest = max(cluster.ages)
    yield Row(
        f"{load.name}: oldest first token learned from", oldest, "versions", "limit", MOST_AGE,
        MOST_AGE / max(oldest, 1), 1.0, oldest <= MOST_AGE,
    )  # fmt: skip


def _share(name: str, share: float, parts: str) -> Row:
    return Row(name, share, "of the time", parts, 1.0, share, BUSY, share >= BUSY)


SMOKE: dict[str, object] = {
    "LOADS": [Load("llama-3-8b", 8, 80, 2_000, 8_000)],
    "WARM_STEPS": 2,
    "STEPS": 4,
    "TICKS": 10,
    "BUSY": 0.0,
}


if __name__ == "__main__":
    raise SystemExit(run("virtual_cluster", measure, smoke=SMOKE))
