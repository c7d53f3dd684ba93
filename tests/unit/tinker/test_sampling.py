"""Samples beside transformers' own generation and beside what the model says of them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from services.tinker.shared_model import SampledTokens, SamplingOptions, SharedModel, prompt_logprobs, sample

PROMPTS = ([15, 5, 6], [27, 7, 9, 11, 15, 5])


def nothing() -> None:
    return


def drawn(
    model: SharedModel, prompts: tuple[list[int], ...], options: SamplingOptions, seed: int = 0
) -> list[SampledTokens]:
    model.use(None)
    sequences = [
        SampledTokens(prompt, options, torch.Generator().manual_seed(seed + number))
        for number, prompt in enumerate(prompts)
    ]
    sample(model, sequences, nothing)
    return sequences


def test_the_likeliest_tokens_are_those_that_transformers_generates(shared: SharedModel) -> None:
    found = drawn(shared, PROMPTS, SamplingOptions(max_tokens=12, temperature=0))
    for sequence in found:
        expected = shared.model.generate(
            torch.tensor([sequence.prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert sequence.tokens == expected[0, len(sequence.prompt) :].tolist()


def test_log_probs_are_what_the_model_says_of_the_same_tokens_at_any_temperature(shared: SharedModel) -> None:
    for sequence in drawn(shared, PROMPTS, SamplingOptions(max_tokens=10, temperature=0.5, top_k=20)):
        known = prompt_logprobs(shared, [*sequence.prompt, *sequence.tokens], 0)
        assert math.isnan(known[0])
        assert sequence.logprobs == pytest.approx(known[len(sequence.prompt) :], abs=1e-4)


def test_the_same_seed_draws_the_same_beside_whatever_else(shared: SharedModel) -> None:
    options = SamplingOptions(max_tokens=10)
    alone = drawn(shared, PROMPTS[:1], options, seed=7)[0].tokens
    assert drawn(shared, (PROMPTS[0], PROMPTS[1]), options, seed=7)[0].tokens == alone
    assert drawn(shared, PROMPTS[:1], options, seed=8)[0].tokens != alone


def test_frequencies_are_the_models_within_top_k(shared: SharedModel) -> None:
    found = drawn(shared, (PROMPTS[0],) * 400, SamplingOptions(max_tokens=1, top_k=3))
    counts = Counter(sequence.tokens[0] for sequence in found)
    shared.use(None)
    with torch.no_grad():
        logits_V = shared.logits(torch.tensor([PROMPTS[0]]), torch.ones((1, 3), dtype=torch.long))[0, -1]
    best = logits_V.topk(3)
    expected = dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        # Seeds are fixed; six standard deviations.
        assert abs(counts[token] / 400 - probability) < 6 * math.sqrt(probability * (1 - probability) / 400) + 1e-9


def test_a_small_top_p_leaves_the_likeliest_token(shared: SharedModel) -> None:
    greedy = drawn(shared, PROMPTS, SamplingOptions(max_tokens=5, temperature=0))
    narrow = drawn(shared, PROMPTS, SamplingOptions(max_tokens=5, top_p=1e-6))
    assert [each.tokens for each in narrow] == [each.tokens for each in greedy]


def test_stops_end_a_sequence_and_stay_in_it(shared: SharedModel) -> None:
    free = drawn(shared, PROMPTS[:1], SamplingOptions(max_tokens=8, temperature=0))[0]
    assert not free.stopped
    stop = free.tokens[3]
    at = free.tokens.index(stop)
    ended = drawn(shared, PROMPTS[:1], SamplingOptions(8, temperature=0, stop_tokens=frozenset({stop})))[0]
    assert ended.stopped
    assert ended.tokens == free.tokens[: at + 1]
    text = shared.tokenizer.decode([stop])
    said = drawn(shared, PROMPTS[:1], SamplingOptions(8, temperature=0, stop_strings=(text,)))[0]
    assert said.stopped
    assert text in shared.tokenizer.decode(said.tokens)
    assert len(said.tokens) <= at + 1


def test_the_last_tokens_of_a_prompt_are_scored_alone(shared: SharedModel) -> None:
    shared.use(None)
    whole, last = prompt_logprobs(shared, PROMPTS[1], 0), prompt_logprobs(shared, PROMPTS[1], 2)
    assert last[-2:] == whole[-2:]
    assert all(map(math.isnan, last[:-2]))
