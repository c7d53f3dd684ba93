"""The progress of one prompt's estimate: the counts so far, the next samples, and what is kept for later runs.

Progress is written to one Redis hash per run and prompt, after the trajectories are in the replay buffer. So when a
worker is killed, the next one repeats at most one chunk, under the same trajectory ids, and counts nothing twice.

    imported       features of the prompt, JSON: human solutions and stored experience are in the buffer
    recalled       counts of an earlier run
    value-START    counts of the samples from START on
    extra-START, retry-START   the same for offline data that does not count
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
from spo.messaging.run_status import write_of_run
from spo.model.chat import ChatFormat
from spo.observability import metrics
from spo.rpc.message_sizes import samples_per_message
from spo.spec.job_spec import JobSpec, ValueSpec
from spo.spec.stored import record_from_json
from spo.v1.prompt_pb2 import Prompt, Sampling
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
        """The counts of the value so far."""
        done = self._done().items()
        parts = (Counts.decode(text) for name, text in done if name.startswith((RECALLED, f"{VALUE}-")))
        return total(parts, self.spec.tasks.reward)

    def features(self) -> PromptFeatures:
        """The prompt's features, as they were stored with its imports."""
        noted = self._done().get(IMPORTED)
        return record_from_json(PromptFeatures, noted) if noted else PromptFeatures()

    def note_imports(self, features: PromptFeatures) -> None:
        """Store that human solutions and stored experience are in the buffer, and the prompt's features."""
        self._note(IMPORTED, json.dumps(asdict(features)))

    @property
    def imports_are_noted(self) -> bool:
        return self.client.hexists(self._progress, IMPORTED)

    def recall(self) -> None:
        """Take over the counts of an earlier run under the same key, and its samples where they are kept; only once.

        Where they are fewer than this run needs, the rest is sampled in addition.
        """
        if any(name != IMPORTED for name in self._done()):
            return
        stored = self.client.hgetall(own_keys.value_counts(self.value_key))
        counts = total(map(Counts.decode, stored.values()), self.spec.tasks.reward)
        if not counts.samples:
            return
        if self.keeps_samples:
            origin = self.client.get(self._origin)
            found = self.maker.recall_reference(self.request.prompt, origin.decode()) if origin else []
            if not found:
                # The counts are known, but their samples are gone or were others: both are made again.
                return
            self.maker.clients.append(self.request.run_id, found)
        self._note(RECALLED, counts.encode())

    def sample_until(self, wanted: int) -> None:
        """Sample pi0 until `wanted` samples are counted, chunk by chunk."""
        self._sample(VALUE, self.request.sampling, self.counted().samples, wanted)

    def sample_offline_only(self) -> None:
        """Sample what becomes offline data without counting: extra samples, and hotter ones where none succeeded.

        Nothing where an earlier run's were taken over with its counts.
        """
        if not self.keeps_samples or RECALLED in self._done():
            return
        extra = self.request.extra_sampling
        self._sample(EXTRA, extra, self._samples_of(EXTRA), extra.samples)
        if self.value.unsolved == "retry_hotter" and not self.counted().successes:
            hotter = _hotter(self.request.sampling, self.value)
            self._sample(RETRY, hotter, self._samples_of(RETRY), hotter.samples)

    def remember(self) -> None:
        """Store the counts for later runs, unless more are stored already, and the run that holds the samples."""
        counts = self.counted()
        if not counts.samples:
            return
        key = own_keys.value_counts(self.value_key)
        stored = self.client.hgetall(key)
        if counts.samples >= total(map(Counts.decode, stored.values()), self.spec.tasks.reward).samples:
            with self.client.pipeline(transaction=True) as pipe:
                pipe.delete(key)
                pipe.hset(key, "all", counts.encode())
                pipe.execute()
            if self.keeps_samples:
                self.client.set(self._origin, self.request.run_id)

    def _sample(self, kind: str, sampling: Sampling, start: int, end: int) -> None:
        model = self.spec.model
        most = min(self.chunk_samples, samples_per_message(model.max_prompt_tokens + model.max_response_tokens))
        while start < end:
            part = Sampling()
            part.CopyFrom(sampling)
            part.samples = min(most, end - start)
            # By its start: samples in addition to an earlier run's are new ones, whatever the sizes of chunks.
            part.seed = (sampling.seed + start) % 2**63
            name = f"{kind}-{start}"
            found = self.maker.sample_reference(self.request.prompt, part, name)
            self._store(name, found)
            start += len(found)

    def _store(self, name: str, found: Sequence[Trajectory]) -> None:
        if self.keeps_samples:
            self.maker.clients.append(self.request.run_id, found)
        self._note(name, count(found, self.spec.tasks.reward).encode())
        metrics.VALUE_SAMPLES.inc(len(found))

    def _note(self, name: str, value: str) -> None:
        run_id = self.request.run_id
        index = ("SADD", redis_keys.prompts_in_progress(run_id), self.request.prompt.prompt_id)
        write_of_run(self.client, run_id, index, ("HSET", self._progress, name, value))

    def _samples_of(self, kind: str) -> int:
        parts = (Counts.decode(text) for name, text in self._done().items() if name.startswith(f"{kind}-"))
        return total(parts, self.spec.tasks.reward).samples

    def _done(self) -> dict[str, bytes]:
        stored = self.client.hgetall(self._progress)
        return {name.decode(): text for name, text in stored.items()}

    @property
    def _progress(self) -> str:
        return redis_keys.value_progress(self.request.run_id, self.request.prompt.prompt_id)

    @property
    def _origin(self) -> str:
        """Key of the id of the run that holds the samples; extra samples and the precision are part of it."""
        extra = self.request.extra_sampling
        beside = f"{extra.samples} {sampler(extra, self.spec.model.chat_format)} {self.spec.model.dtype}"
        if self.value.unsolved == "retry_hotter":
            beside += f" retry {self.value.retry_samples} {self.value.retry_temperature:g}"
        return own_keys.value_origin(self.value_key, beside)


def sampler(sampling: Sampling, chat: ChatFormat) -> str:
    """The sampling settings and the writing of prompts that a value depends on, as text."""
    settings = f"T={sampling.temperature_min:g}..{sampling.temperature_max:g}"
    settings += f" p={sampling.top_p:g} n={sampling.max_tokens}"
    return settings + (f" chat={chat.address}" if chat.address else "")


def decider(prompt: Prompt) -> str:
    """What decides about responses to a prompt, as text: its tests, and the environment that answers its turns."""
    said = f" {prompt.environment} {prompt.environment_json}" if prompt.environment else ""
    return prompt.tests_digest + said


def _hotter(sampling: Sampling, value: ValueSpec) -> Sampling:
    hotter = Sampling()
    hotter.CopyFrom(sampling)
    hotter.samples = value.retry_samples
    hotter.temperature_min = hotter.temperature_max = value.retry_temperature
    hotter.top_p = 1.0
    # Their seeds must differ from those of the counted samples.
    hotter.seed = int(redis_keys.digest("retry", str(sampling.seed))[:15], 16)
    return hotter
