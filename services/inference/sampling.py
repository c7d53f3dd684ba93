"""What a group asks of the engine: its prompt in tokens, and how each of its samples is drawn."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from services.inference.engine import SampleRequest
from services.inference.replica import Assignment
from spo import redis_keys
from spo.errors import InvalidInput
from spo.model.tokenizer import encode_prompt
from spo.spec.section import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from spo.v1.prompt_pb2 import PromptGroup, Sampling

MAX_SAMPLES = 100_000
# Tokenizers keep state between calls and are not thread-safe.
TOKENIZER = threading.Lock()


@dataclass(frozen=True)
class Draw:
    """How one sample of a group is drawn."""

    temperature: float
    seed: int


def draws_of(sampling: Sampling) -> list[Draw]:
    """One per sample: its temperature from U(min, max) and its own seed, both decided by the group's seed.

    Raises InvalidInput on sampling that no engine does.
    """
    _check_sampling(sampling)
    generator = np.random.default_rng(sampling.seed)
    temperatures = generator.uniform(sampling.temperature_min, sampling.temperature_max, sampling.samples)
    seeds = generator.integers(0, 2**63 - 1, sampling.samples)
    return [Draw(float(temperature), int(seed)) for temperature, seed in zip(temperatures, seeds, strict=True)]


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a conversation's turn: that of its sample for the first, and one made of both for each later one."""
    return int(redis_keys.digest("turn", str(seed), str(turn))[:15], 16) if turn else seed


def sample_requests(
    prompt_token_ids: tuple[int, ...], sampling: Sampling, prefix: tuple[int, ...] = ()
) -> list[SampleRequest]:
    """One request per sample; for the engine the response's given prefix is a part of the prompt."""
    draws = draws_of(sampling)
    room = sampling.max_tokens - len(prefix)
    if room < 1:
        raise InvalidInput(f"a prefix of {len(prefix)} tokens leaves no room in a response of {sampling.max_tokens}")
    return [
        SampleRequest((*prompt_token_ids, *prefix), draw.temperature, sampling.top_p, room, draw.seed) for draw in draws
    ]


def prompt_tokens(assignment: Assignment, group: PromptGroup, text: str) -> tuple[int, ...]:
    """The tokens of a group's prompt, after which its responses fit. Raises InvalidInput (code "prompt_too_long")."""
    model = assignment.spec.model
    with TOKENIZER:
        token_ids = tuple(encode_prompt(assignment.tokenizer, text, model.chat_format))
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


def end_token_ids(assignment: Assignment) -> tuple[int, ...]:
    """The tokens that end what the model writes."""
    with TOKENIZER:
        return assignment.end_token_ids


def _check_sampling(sampling: Sampling) -> None:
    low, high = sampling.temperature_min, sampling.temperature_max
    if not 1 <= sampling.samples <= MAX_SAMPLES:
        raise InvalidInput(f"a group has 1 to {MAX_SAMPLES} samples, not {sampling.samples}")
    if sampling.max_tokens < 1:
        raise InvalidInput("max_tokens must be at least 1")
    # As the wire rounds it. vLLM would sample hotter than this without saying so, and refuse what is hotter than high.
    lowest = float(np.float32(LOWEST_TEMPERATURE))
    if not (low == high == 0 or lowest <= low <= high <= HIGHEST_TEMPERATURE):
        raise InvalidInput(
            f"temperatures must be {LOWEST_TEMPERATURE:g} <= min <= max <= {HIGHEST_TEMPERATURE:g}, or both 0, "
            f"not {low:g} and {high:g}"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidInput(f"top_p must be in (0, 1], not {sampling.top_p}")
