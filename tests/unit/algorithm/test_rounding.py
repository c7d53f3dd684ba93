"""How far log-probs may differ by rounding: as measured, growing with length and precision, and said in words."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.trainer.batches import sampler_alarm, sampler_metrics
from spo.algorithm.objectives import DEVIATIONS, ONE_TOKEN, Difference, Rounding
from spo.model.logprobs import ATTENTION, token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_and_packed_forwards_differ_by_less_and_another_model_by_more(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, **sizes)).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.15)
    torch.nn.Module.to(model, dtype).save_pretrained(tmp_path)
    layouts = [
        LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation=attention).eval()
        for attention in ("sdpa", ATTENTION)
    ]
    ids_BL = torch.randint(5, 2000, (3, 300))
    mask_BL = torch.ones_like(ids_BL)
    mask_BL[0, 40:] = mask_BL[1, 150:] = 0
    with torch.no_grad():
        padded_BL, packed_BL = (token_logprobs(layout, ids_BL, mask_BL) for layout in layouts)
        layouts[0].model.layers[0].mlp.down_proj.weight.mul_(1.5)
        changed_BL = token_logprobs(layouts[0], ids_BL, mask_BL)

    given = mask_BL.bool(), Rounding.of_one_forward(dtype)
    assert Difference.between(padded_BL, packed_BL, *given).excess_B.max() < 0.5
    # What a wrong weight does to a short response bfloat16 may hide; over more tokens it shows.
    assert Difference.between(changed_BL, packed_BL, *given).excess_B.max() > 1


def test_the_tolerance_grows_like_a_walk() -> None:
    rounding = Rounding.of_one_forward(torch.bfloat16)
    short, long = rounding.tolerance(torch.tensor([1.0, 400.0])).tolist()

    assert rounding.token_error == pytest.approx(4 * 2**-7)
    assert short == pytest.approx(rounding.token_error * (DEVIATIONS + ONE_TOKEN))
    assert long == pytest.approx(rounding.token_error * (DEVIATIONS * math.sqrt(400) + ONE_TOKEN))
    assert Rounding.of_one_forward(torch.bfloat16, 2.0).tolerance(torch.tensor([1.0])).item() == pytest.approx(
        2 * short
    )


def test_a_sampler_beyond_rounding_is_an_alarm_with_its_numbers() -> None:
    mask_BL = torch.ones(2, 16, dtype=torch.bool)
    trainer_BL = torch.zeros(2, 16)
    near_BL, far_BL = trainer_BL + 0.01, trainer_BL + 0.9
    rounding = Rounding.of_two_engines(torch.bfloat16)
    near, far = (Difference.between(trainer_BL, other_BL, mask_BL, rounding) for other_BL in (near_BL, far_BL))

    assert sampler_metrics([]) == {}
    assert sampler_alarm(sampler_metrics([near])) == {}
    reason = sampler_alarm(sampler_metrics([near, far]))["sampler_mismatch"]
    assert "0.9 nats at a token and 14.4 in the sum over a response" in reason
    assert "over 16 tokens, where bfloat16 explains" in str(far)
