"""Packed rows: a sequence has the numbers and gradients it has alone, in every model type that is packed."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spo.model.logprobs import (
    ATTENTION,
    PACKABLE,
    PackedRow,
    attend,
    attention_for,
    checkpoint_activations,
    is_packed,
    load_policy,
    response_logprobs,
    token_logprobs,
)
from spo.testing.trainer import write_random_llama

LENGTHS = (3, 17, 9, 30, 30, 1, 2, 11)
WINDOW = 7


def random_model(model_type: str, attention: str, **fields: Any) -> PreTrainedModel:
    """Of this type, with grouped heads and, where the type knows one, a window shorter than most sequences."""
    config = AutoConfig.for_model(
        model_type,
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=8,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        use_sliding_window=True,
        max_window_layers=1,
        **{"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, **fields},
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
    return model


def padded(lengths: tuple[int, ...], side: str = "right") -> tuple[Tensor, Tensor]:
    rng = random.Random(0)
    longest = max(lengths)
    ids_BL = torch.full((len(lengths), longest), 7)
    mask_BL = torch.zeros_like(ids_BL)
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(longest - length, longest)
        ids_BL[row, place] = torch.tensor([rng.randrange(5, 120) for _ in range(length)])
        mask_BL[row, place] = 1
    return ids_BL, mask_BL


def logprobs_and_gradients(model: PreTrainedModel, ids_BL: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    logprobs_BL = token_logprobs(model, ids_BL, mask_BL)
    (logprobs_BL * torch.linspace(-1, 2, ids_BL.shape[1])).sum().backward()
    found = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return logprobs_BL.detach(), torch.cat(found)


@pytest.mark.parametrize("model_type", PACKABLE)
def test_a_packed_batch_has_the_numbers_and_gradients_of_the_padded_one(model_type: str) -> None:
    ids_BL, mask_BL = padded(LENGTHS)
    padding, packing = random_model(model_type, "sdpa"), random_model(model_type, ATTENTION)
    packing.load_state_dict(padding.state_dict())
    rows: list[tuple[int, ...]] = []
    packing.base_model.register_forward_hook(lambda _module, _given, output: rows.append(output[0].shape[:2]))

    plain, found = (logprobs_and_gradients(model, ids_BL, mask_BL) for model in (padding, packing))

    assert is_packed(packing)
    assert not is_packed(padding)
    assert rows == [(1, sum(LENGTHS))]
    assert (found[0] - plain[0]).abs().max() < 1e-5
    assert (found[1] - plain[1]).abs().max() < 1e-5 * plain[1].abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_sequence_has_the_same_logprobs_whatever_it_is_packed_with(
    model_type: str, dtype: torch.dtype, tolerance: float
) -> None:
    """To the last bit in bfloat16: rounding differences there would be a thousand times those of float32."""
    model = torch.nn.Module.to(random_model(model_type, ATTENTION), dtype)
    ids_BL, mask_BL = padded(LENGTHS)
    with torch.no_grad():
        together_BL = token_logprobs(model, ids_BL, mask_BL)
        backwards_BL = token_logprobs(model, ids_BL.flip(0), mask_BL.flip(0)).flip(0)
        alone = [
            token_logprobs(model, ids_BL[row : row + 1, :length], mask_BL[row : row + 1, :length])[0]
            for row, length in enumerate(LENGTHS)
        ]

    assert (together_BL - backwards_BL).abs().max() <= tolerance
    for row, found in enumerate(alone):
        assert (found - together_BL[row, : len(found)]).abs().max() <= tolerance


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_run_again_in_the_backward_pass_are_told_where_sequences_begin(reentrant: bool) -> None:
    ids_BL, mask_BL = padded(LENGTHS)
    model = random_model("mistral", ATTENTION, attention_dropout=0.1)
    expected = logprobs_and_gradients(model, ids_BL, mask_BL)
    assert checkpoint_activations(model, reentrant=reentrant)
    found = logprobs_and_gradients(model, ids_BL, mask_BL)

    assert torch.allclose(found[0], expected[0], atol=1e-6)
    assert torch.allclose(found[1], expected[1], atol=1e-4, rtol=1e-4)


def test_no_mask_over_all_pairs_of_tokens_is_made() -> None:
    model = random_model("mistral", ATTENTION)
    row = PackedRow.of(padded((600, 500))[1])
    masks: list[Any] = []
    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(
            lambda _module, _given, named: masks.append(named["attention_mask"]), with_kwargs=True
        )
    with torch.no_grad():
        model(input_ids=torch.full((1, 1100), 9), **row.model_inputs(), use_cache=False)

    assert masks == [None] * 3


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=9).map(tuple),
    side=st.sampled_from(["left", "right"]),
    data=st.data(),
)
def test_any_batch_in_any_cut_has_the_same_logprobs(lengths: tuple[int, ...], side: str, data: st.DataObject) -> None:
    model = MODELS.setdefault("qwen2", random_model("qwen2", ATTENTION))
    ids_BL, mask_BL = padded(lengths, side)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    with torch.no_grad():
        whole_BL = token_logprobs(model, ids_BL, mask_BL)
        parts = [token_logprobs(model, ids_BL[rows], mask_BL[rows]) for rows in (order[:cut], order[cut:]) if rows]

    assert whole_BL[mask_BL == 0].eq(0).all()
    assert torch.allclose(torch.cat(parts), whole_BL[order], atol=1e-5)


MODELS: dict[str, PreTrainedModel] = {}


def test_other_models_and_jobs_that_do_not_want_it_are_padded() -> None:
    assert attention_for({"model_type": "llama"}, packing=True) == ATTENTION
    assert attention_for({"model_type": "llama"}, packing=False) == "sdpa"
    assert attention_for({"model_type": "mamba2"}, packing=True) == "sdpa"
    assert attention_for({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, packing=True) == "eager"


def test_a_soft_cap_on_attention_is_kept(tmp_path: Path) -> None:
    model = random_model("gemma2", "eager", attn_logit_softcapping=0.5, final_logit_softcapping=None)
    model.save_pretrained(tmp_path)
    ids_BL, mask_BL = padded((9, 9))
    with torch.no_grad():
        expected_BL = token_logprobs(model, ids_BL, mask_BL)
        found_BL = token_logprobs(load_policy(tmp_path, "float32"), ids_BL, mask_BL)

    assert torch.allclose(found_BL, expected_BL, atol=1e-5)


def test_forwards_of_value_estimation_hold_their_tokens_without_padding(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "llama", seed=0)
    sizes: dict[bool, list[int]] = {True: [], False: []}
    found = {}
    for packing, seen in sizes.items():
        model = load_policy(tmp_path / "llama", "float32", packing=packing)
        model.base_model.register_forward_hook(partial(_note_tokens, seen))
        prompts, responses = [[5, 6, 7]] * 4, [[9] * length for length in (1, 20, 40, 61)]
        found[packing] = response_logprobs(model, prompts, responses, max_tokens_per_batch=128)

    assert max(map(max, sizes.values())) <= 128
    assert sum(sizes[True]) == 4 * 3 + 1 + 20 + 40 + 61 < sum(sizes[False])
    assert found[True] == [pytest.approx(row, abs=1e-5) for row in found[False]]


def test_gaps_of_conversations_are_the_same_packed_and_padded(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "llama", seed=0)
    prompts, responses = [[5, 6, 7]] * 3, [[9, 8, 11, 12] * length for length in (1, 3, 5)]
    trained = [None, [number % 3 == 0 for number in range(12)], [number >= 17 for number in range(20)]]
    every, packed, apart = (
        response_logprobs(load_policy(tmp_path / "llama", "float32", packing=packing), prompts, responses, 256, mask)
        for packing, mask in ((True, None), (True, trained), (False, trained))
    )
    assert packed == [pytest.approx(row, abs=1e-5) for row in apart]
    for mask, whole, found in zip(trained, every, packed, strict=True):
        kept = mask or [True] * len(whole)
        expected = [logprob if wanted else 0.0 for wanted, logprob in zip(kept, whole, strict=True)]
        assert found == pytest.approx(expected, abs=1e-5)


def _note_tokens(seen: list[int], _module: Any, _given: Any, output: Any) -> None:
    seen.append(output[0].shape[:2].numel())


def test_the_gpu_kernel_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and shapes only, on tensors without values: the kernel itself needs a GPU."""
    monkeypatch.setattr("spo.model.logprobs._has_varlen_kernel", lambda *_: True)
    query, key = (torch.empty(1, heads, 12, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32, device="meta")
    options: dict[str, Any] = {"scaling": 0.1, "sliding_window": 4, "cu_seq_lens_q": bounds, "max_length_q": 7}

    assert attend(torch.nn.Module(), query, key, key, None, **options)[0].shape == (1, 12, 4, 64)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("prompts", [(12,), (12, 5)])
def test_a_model_that_is_packed_generates_from_its_cache_what_any_other_does(
    model_type: str, prompts: tuple[int, ...]
) -> None:
    ids_BL, mask_BL = padded(prompts, side="left")
    plain, packing = random_model(model_type, "sdpa"), random_model(model_type, ATTENTION)
    packing.load_state_dict(plain.state_dict())

    wanted_BL, found_BL = (
        model.generate(ids_BL, attention_mask=mask_BL, do_sample=False, min_new_tokens=20, max_new_tokens=20)
        for model in (plain, packing)
    )

    assert torch.equal(found_BL, wanted_BL)
