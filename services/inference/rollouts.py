"""From a PromptGroup to its RolloutGroup: the same path for the stream and for gRPC."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from services.inference.engine import Sample, SampleRequest
from services.inference.engine_thread import SampleGroup
from services.inference.replica import Assignment, ServingReplica
from spo import redis_keys
from spo.errors import InvalidInput, Unreachable
from spo.model.logprobs import encode_prompt
from spo.v1.prompt_pb2 import PromptGroup, Sampling
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Hop, RolloutGroup, Trajectory

MAX_SAMPLES = 100_000
# Tokenizers keep state between calls and are not thread-safe.
_TOKENIZER = threading.Lock()


@dataclass(frozen=True)
class StartedGroup:
    """A group the engine works on."""

    request: PromptGroup
    sampler: str
    samples: SampleGroup
    tokenizer: PreTrainedTokenizerBase

    @property
    def future(self) -> Future[list[Sample]]:
        return self.samples.future

    def cancel(self) -> None:
        """Abort the group's sequences, unless it is finished."""
        self.future.cancel()

    def result(self, timeout_seconds: float) -> RolloutGroup:
        """The finished group. Raises Unreachable after timeout_seconds, or what the engine raised."""
        try:
            finished = self.future.result(timeout_seconds)
        except TimeoutError:
            self.cancel()
            raise Unreachable(f"the engine did not finish the group in {timeout_seconds:.1f} s") from None
        now = int(time.time() * 1000)
        return RolloutGroup(
            request=self.request,
            trajectories=[
                self._trajectory(index, sample_request, sample, now)
                for index, (sample_request, sample) in enumerate(zip(self.samples.requests, finished, strict=True))
            ],
        )

    def _trajectory(self, index: int, sample_request: SampleRequest, sample: Sample, now: int) -> Trajectory:
        group = self.request
        prefix = group.response_prefix_token_ids
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(
                group.run_id, group.group_id, index, group.attempt, sample.version_first
            ),
            group_id=group.group_id,
            run_id=group.run_id,
            prompt_id=group.prompt.prompt_id,
            sample_index=index,
            attempt=group.attempt,
            source=group.source,
            prompt_token_ids=sample_request.prompt_token_ids[: len(sample_request.prompt_token_ids) - len(prefix)],
            response_token_ids=[*prefix, *sample.token_ids],
            # The prefix was given, not sample_request: it has none.
            sampling_logprobs=[] if prefix else sample.logprobs,
            response_text=self._text([*prefix, *sample.token_ids]) if prefix else sample.text,
            policy_version_first=sample.version_first,
            policy_version_last=sample.version_last,
            temperature=sample_request.temperature,
            top_p=sample_request.top_p,
            seed=sample_request.seed,
            finish_reason=FINISH_REASON_STOP if sample.stopped else FINISH_REASON_LENGTH,
            sampler=self.sampler,
            created_unix_ms=now,
            hops=[Hop(service="inference", at_unix_ms=now)],
        )

    def _text(self, token_ids: list[int]) -> str:
        with _TOKENIZER:
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def start_group(replica: ServingReplica, group: PromptGroup) -> StartedGroup:
    """Submit a group to the engine.

    Raises InvalidInput on a prompt or sampling that can never be served, NotFound or IntegrityError when the policy
    version it names is not available, NotReady or PreconditionFailed when this replica does not serve its run.
    """
    assignment = replica.serving(group.run_id)
    weights = None
    if group.HasField("policy_version"):
        weights = assignment.versions.resolve(group.run_id, group.policy_version)
    prompt_token_ids = _prompt_tokens(assignment, group)
    requests = sample_requests(prompt_token_ids, group.sampling, tuple(group.response_prefix_token_ids))
    samples = SampleGroup(group.run_id, requests, weights)
    assignment.engine.submit(samples)
    return StartedGroup(group, assignment.sampler, samples, assignment.tokenizer)


def sample_requests(
    prompt_token_ids: tuple[int, ...], sampling: Sampling, prefix: tuple[int, ...] = ()
) -> list[SampleRequest]:
    """One request per sample: its temperature from U(min, max) and its own seed, both decided by the group's seed.

    For the engine the response's given prefix is a part of the prompt.
    """
    _check_sampling(sampling)
    room = sampling.max_tokens - len(prefix)
    if room < 1:
        raise InvalidInput(f"a prefix of {len(prefix)} tokens leaves no room in a response of {sampling.max_tokens}")
    generator = np.random.default_rng(sampling.seed)
    temperatures = generator.uniform(sampling.temperature_min, sampling.temperature_max, sampling.samples)
    seeds = generator.integers(0, 2**63 - 1, sampling.samples)
    return [
        SampleRequest((*prompt_token_ids, *prefix), float(temperature), sampling.top_p, room, int(seed))
        for temperature, seed in zip(temperatures, seeds, strict=True)
    ]


def _check_sampling(sampling: Sampling) -> None:
    low, high = sampling.temperature_min, sampling.temperature_max
    if not 1 <= sampling.samples <= MAX_SAMPLES:
        raise InvalidInput(f"a group has 1 to {MAX_SAMPLES} samples, not {sampling.samples}")
    if sampling.max_tokens < 1:
        raise InvalidInput("max_tokens must be at least 1")
    if not (math.isfinite(high) and 0 <= low <= high):
        raise InvalidInput(f"temperatures must be 0 <= min <= max, not {low} and {high}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidInput(f"top_p must be in (0, 1], not {sampling.top_p}")


def _prompt_tokens(assignment: Assignment, group: PromptGroup) -> tuple[int, ...]:
    model = assignment.spec.model
    with _TOKENIZER:
        token_ids = tuple(encode_prompt(assignment.tokenizer, group.prompt.text))
    if len(token_ids) > model.max_prompt_tokens:
        raise InvalidInput(
            f"the prompt has {len(token_ids)} tokens, more than max_prompt_tokens {model.max_prompt_tokens}",
            code="prompt_too_long",
        )
    room = assignment.engine_spec.max_tokens - len(token_ids)
    if group.sampling.max_tokens > room:
        raise InvalidInput(
            f"{group.sampling.max_tokens} response tokens do not fit: the model has room for {room} after the prompt",
            code="prompt_too_long",
        )
    return token_ids
