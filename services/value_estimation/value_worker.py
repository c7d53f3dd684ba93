"""Estimates Qhat_0: takes prompts off the stream `estimates`, samples pi0, has the samples judged, counts successes.

Resumable by chunk: a chunk's counts are written after its trajectories are in the replay buffer, so a killed worker's
successor repeats at most one chunk per prompt, under the same trajectory ids.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis
from google.protobuf.message import DecodeError

from services.value_estimation.hands import work_through
from services.value_estimation.peers import Peers
from services.value_estimation.reference import References
from services.value_estimation.samples import SampleMaker
from services.value_estimation.settings import Settings
from spo import metrics, redis_keys
from spo.errors import InvalidInput, NotReady
from spo.job_spec import JobSpec
from spo.v1.prompt_pb2 import Sampling
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import EstimateRequest, PromptValue

WANTED_STATES = (b"validating", b"estimating", b"running", b"pausing", b"paused")


@dataclass(frozen=True)
class Chunk:
    """Part of the samples of a prompt that is asked for, judged and stored at once."""

    name: str
    sampling: Sampling
    counts: bool


@dataclass
class ValueWorker:
    """Estimates prompts_in_hand prompts at once, one thread each, so that engine and judge overlap."""

    client: redis.Redis
    references: References
    peers: Peers
    settings: Settings
    name: str

    def run(self, stop: threading.Event) -> None:
        """Work until stop is set."""
        estimates = redis_keys.estimates()
        work_through(self.client, estimates, self.name, self.settings, lambda raw: self.estimate(_decode(raw)), stop)

    def estimate(self, request: EstimateRequest) -> None:
        """Make the prompt's offline trajectories and write its value; nothing when that is done or unwanted already.

        Raises NotReady when a peer stayed away too long.
        """
        known = self.client.hexists(redis_keys.run_values(request.run_id), request.prompt.prompt_id)
        if known or not self._wanted(request.run_id):
            return
        try:
            self._estimate(request)
        except NotReady:
            # The replicas of a cancelled run serve another one: what it waited for will not come.
            if self._wanted(request.run_id):
                raise

    def _estimate(self, request: EstimateRequest) -> None:
        run_id, prompt = request.run_id, request.prompt
        spec = self.references.spec(run_id)
        reference = self.references.of(run_id)
        maker = SampleMaker(run_id, reference, replace(self.peers, wanted=lambda: self._wanted(run_id)))
        self._import_human(maker, request, spec)
        value_key = redis_keys.value_key(
            reference.model_hash,
            prompt.prompt_id,
            prompt.tests_digest,
            _sampler(request.sampling),
            maker.peers.judge_version(),
        )
        keep = spec.offline.keep_reference_samples
        counts = self._recall(maker, request, value_key, keep) or self._sample(maker, request, value_key, keep)
        value = PromptValue(
            prompt_id=prompt.prompt_id,
            value_key=value_key,
            samples=sum(samples for samples, _ in counts),
            successes=sum(successes for _, successes in counts),
        )
        self.client.hset(redis_keys.run_values(run_id), prompt.prompt_id, value.SerializeToString())
        if keep:
            # Last: a run that is resumed must not take itself for an earlier one.
            self.client.set(_origin(request, value_key), run_id)

    def _wanted(self, run_id: str) -> bool:
        state: Any = self.client.get(redis_keys.run_state(run_id))
        return state in WANTED_STATES

    def _import_human(self, maker: SampleMaker, request: EstimateRequest, spec: JobSpec) -> None:
        if request.human_solutions:
            limit = spec.model.max_response_tokens
            human = maker.import_human(request.prompt, request.human_solutions, limit)
            if human:
                maker.peers.append(request.run_id, human)

    def _recall(
        self, maker: SampleMaker, request: EstimateRequest, value_key: str, keep: bool
    ) -> list[tuple[int, int]]:
        """Counts of an earlier run with the same key, its samples taken over where they are kept; else none."""
        stored: Any = self.client.hgetall(redis_keys.value_counts(value_key))
        counts = [_parse(text) for text in stored.values()]
        if not counts or sum(samples for samples, _ in counts) < request.sampling.samples:
            return []
        if keep:
            origin: Any = self.client.get(_origin(request, value_key))
            found = maker.recall_reference(request.prompt, origin.decode()) if origin else []
            if not found:
                return []
            maker.peers.append(request.run_id, found)
        return counts

    def _sample(
        self, maker: SampleMaker, request: EstimateRequest, value_key: str, keep: bool
    ) -> list[tuple[int, int]]:
        progress = redis_keys.value_progress(request.run_id, request.prompt.prompt_id)
        done: Any = self.client.hgetall(progress)
        counts = []
        for chunk in _chunks(request, self.settings.chunk_samples):
            if not (chunk.counts or keep):
                continue
            stored = done.get(chunk.name.encode())
            if stored is None:
                found = maker.sample_reference(request.prompt, chunk.sampling, chunk.name)
                if keep:
                    maker.peers.append(request.run_id, found)
                stored = f"{len(found)}:{_successes(found)}".encode()
                self.client.hset(progress, chunk.name, stored)
                metrics.VALUE_SAMPLES.inc(len(found))
            if chunk.counts:
                counts.append(_parse(stored))
        self._remember(value_key, counts)
        return counts

    def _remember(self, value_key: str, counts: Sequence[tuple[int, int]]) -> None:
        """Keep the counts for later runs, all chunks of one estimate together."""
        key = redis_keys.value_counts(value_key)
        with self.client.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            for index, (samples, successes) in enumerate(counts):
                pipe.hset(key, str(index), f"{samples}:{successes}")
            pipe.execute()


def _chunks(request: EstimateRequest, size: int) -> Iterator[Chunk]:
    """The samples of a request in chunks, each with its own seed: first those that count, then the extra ones."""
    for kind, sampling in (("value", request.sampling), ("extra", request.extra_sampling)):
        for index, start in enumerate(range(0, sampling.samples, size)):
            part = Sampling()
            part.CopyFrom(sampling)
            part.samples = min(size, sampling.samples - start)
            part.seed = (sampling.seed + index) % 2**63
            yield Chunk(f"{kind}-{index}", part, counts=kind == "value")


def _origin(request: EstimateRequest, value_key: str) -> str:
    """Key of the run that stored the samples; those with other extra samples are another set."""
    extra = request.extra_sampling
    return redis_keys.value_origin(value_key, f"{extra.samples} {_sampler(extra)}")


def _sampler(sampling: Sampling) -> str:
    """The settings that a value depends on."""
    return f"T={sampling.temperature_min:g}..{sampling.temperature_max:g} p={sampling.top_p:g} n={sampling.max_tokens}"


def _successes(trajectories: Sequence[Trajectory]) -> int:
    return sum(each.reward >= 0 for each in trajectories)


def _parse(text: bytes) -> tuple[int, int]:
    samples, successes = text.split(b":")
    return int(samples), int(successes)


def _decode(payload: bytes) -> EstimateRequest:
    try:
        return EstimateRequest.FromString(payload)
    except DecodeError as error:
        raise InvalidInput(f"not an EstimateRequest: {error}", code="malformed_entry") from None
