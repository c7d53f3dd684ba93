"""The estimate of one prompt on its way: what is counted so far, the next samples, what a later run finds.

Everything that was done is noted in one Redis hash per run and prompt, after its trajectories are in the replay buffer:
a killed worker's successor repeats at most one chunk, under the same trajectory ids, and counts nothing twice.

    imported       features of the prompt, JSON; human solutions and stored experience are in
    recalled       counts taken over from an earlier run
    value-START    counts of the samples from START on
    extra-START, retry-START   likewise; offline data that does not count
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from services.value_estimation import redis_keys as own_keys
from services.value_estimation.counts import Counts, count, total
from services.value_estimation.samples import SampleMaker
from spo import redis_keys
from spo.algorithm.value_prior import PromptFeatures
from spo.messaging.redis_client import RedisClient
from spo.observability import metrics
from spo.spec.job_spec import JobSpec, ValueSpec
from spo.v1.prompt_pb2 import Sampling
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import EstimateRequest

IMPORTED, RECALLED, VALUE, EXTRA, RETRY = "imported", "recalled", "value", "extra", "retry"


@dataclass(frozen=True)
class PromptEstimate:
    """One prompt of one run; value_key names its counts across runs, population_key the prompts sampled alike."""

    client: RedisClient
    request: EstimateRequest
    spec: JobSpec
    value: ValueSpec
    maker: SampleMaker
    value_key: str
    population_key: str
    chunk_samples: int

    @property
    def keeps_samples(self) -> bool:
        return self.spec.offline.keep_reference_samples

    def counted(self) -> Counts:
        """All counts that make the value so far."""
        return total(
            Counts.decode(text) for name, text in self._done().items() if name.startswith((RECALLED, f"{VALUE}-"))
        )

    def features(self) -> PromptFeatures:
        """What was noted with the imports."""
        noted = self._done().get(IMPORTED)
        return PromptFeatures(**json.loads(noted)) if noted else PromptFeatures()

    def note_imports(self, features: PromptFeatures) -> None:
        """Human solutions and stored experience are in."""
        self.client.hset(self._progress, IMPORTED, json.dumps(asdict(features)))

    @property
    def imports_are_noted(self) -> bool:
        return self.client.hexists(self._progress, IMPORTED)

    def recall(self) -> None:
        """Take over what an earlier run counted under the same key, its samples too where they are kept; only once.

        Fewer than this run wants are a start: the rest is sampled on top.
        """
        if any(name != IMPORTED for name in self._done()):
            return
        stored = self.client.hgetall(own_keys.value_counts(self.value_key))
        counts = total(map(Counts.decode, stored.values()))
        if not counts.samples:
            return
        if self.keeps_samples:
            origin = self.client.get(self._origin)
            found = self.maker.recall_reference(self.request.prompt, origin.decode()) if origin else []
            if not found:
                # The values are known but their samples are gone or were others: both are made anew.
                return
            self.maker.clients.append(self.request.run_id, found)
        self.client.hset(self._progress, RECALLED, counts.encode())

    def sample_until(self, wanted: int) -> None:
        """Sample pi0 until `wanted` samples count, chunk by chunk."""
        self._sample(VALUE, self.request.sampling, self.counted().samples, wanted)

    def sample_offline_only(self) -> None:
        """The samples that become offline data without counting: the extra ones, and hotter ones where nothing passed.

        None where an earlier run's were taken over with its counts.
        """
        if not self.keeps_samples or RECALLED in self._done():
            return
        extra = self.request.extra_sampling
        self._sample(EXTRA, extra, self._samples_of(EXTRA), extra.samples)
        if self.value.unsolved == "retry_hotter" and not self.counted().successes:
            hotter = _hotter(self.request.sampling, self.value)
            self._sample(RETRY, hotter, self._samples_of(RETRY), hotter.samples)

    def remember(self) -> None:
        """Keep the counts for later runs, unless there are more already, and say where the samples are."""
        counts = self.counted()
        if not counts.samples:
            return
        key = own_keys.value_counts(self.value_key)
        stored = self.client.hgetall(key)
        if counts.samples >= total(map(Counts.decode, stored.values())).samples:
            with self.client.pipeline(transaction=True) as pipe:
                pipe.delete(key)
                pipe.hset(key, "all", counts.encode())
                pipe.execute()
            if self.keeps_samples:
                self.client.set(self._origin, self.request.run_id)

    def _sample(self, kind: str, sampling: Sampling, start: int, end: int) -> None:
        while start < end:
            part = Sampling()
            part.CopyFrom(sampling)
            part.samples = min(self.chunk_samples, end - start)
            # By where it starts: samples on top of an earlier run's are new ones, whatever the runs' chunks.
            part.seed = (sampling.seed + start) % 2**63
            name = f"{kind}-{start}"
            found = self.maker.sample_reference(self.request.prompt, part, name)
            self._store(name, found)
            start += len(found)

    def _store(self, name: str, found: Sequence[Trajectory]) -> None:
        if self.keeps_samples:
            self.maker.clients.append(self.request.run_id, found)
        self.client.hset(self._progress, name, count(found, self.spec.tasks.reward).encode())
        metrics.VALUE_SAMPLES.inc(len(found))

    def _samples_of(self, kind: str) -> int:
        done = self._done()
        return total(Counts.decode(text) for name, text in done.items() if name.startswith(f"{kind}-")).samples

    def _done(self) -> dict[str, bytes]:
        stored = self.client.hgetall(self._progress)
        return {name.decode(): text for name, text in stored.items()}

    @property
    def _progress(self) -> str:
        return redis_keys.value_progress(self.request.run_id, self.request.prompt.prompt_id)

    @property
    def _origin(self) -> str:
        """Key of the run that holds the samples; with other samples beside the counted ones, or log-probs of another
        precision, it is another origin.
        """
        extra = self.request.extra_sampling
        beside = f"{extra.samples} {sampler(extra)} {self.spec.model.dtype}"
        if self.value.unsolved == "retry_hotter":
            beside += f" retry {self.value.retry_samples} {self.value.retry_temperature:g}"
        return own_keys.value_origin(self.value_key, beside)


def sampler(sampling: Sampling) -> str:
    """The settings that a value depends on."""
    return f"T={sampling.temperature_min:g}..{sampling.temperature_max:g} p={sampling.top_p:g} n={sampling.max_tokens}"


def _hotter(sampling: Sampling, value: ValueSpec) -> Sampling:
    hotter = Sampling()
    hotter.CopyFrom(sampling)
    hotter.samples = value.retry_samples
    hotter.temperature_min = hotter.temperature_max = value.retry_temperature
    hotter.top_p = 1.0
    # Another purpose than the counted samples: their seeds must not meet.
    hotter.seed = int(redis_keys.digest("retry", str(sampling.seed))[:15], 16)
    return hotter
