"""Log-probs in blocks of the vocabulary: the plain path's numbers and gradients, without the plain path's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spo.model import logprobs
from spo.model.logprobs import ATTENTION, LogprobHead, chosen_logprobs, give_logprob_head, token_logprobs

TOKENS, WIDTH, WORDS = 37, 16, 101


@pytest.fixture(params=[(64 << 20, 8192), (4 * 37 * 10, 8192), (4 * 8 * 10, 8)], ids=["one", "columns", "both"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", request.param[0])
    monkeypatch.setattr(logprobs, "TOKENS_PER_CHUNK", request.param[1])


def example(dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    hidden_TD, weight_VD = torch.randn(TOKENS, WIDTH), torch.randn(WORDS, WIDTH)
    bias_V = torch.randn(WORDS).to(dtype) if bias else None
    # Some tokens twice, the first and the last word among them.
    tokens_T = torch.randint(0, WORDS, (TOKENS,))
    tokens_T[:4] = torch.tensor([0, WORDS - 1, 5, 5])
    return hidden_TD.to(dtype), weight_VD.to(dtype), bias_V, tokens_T


def plain(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tokens_T: Tensor) -> Tensor:
    logits_TV = nn.functional.linear(hidden_TD, weight_VD, bias_V)
    return logits_TV.log_softmax(dim=-1)[torch.arange(len(tokens_T)), tokens_T]


def gradients(function: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tokens_T: Tensor) -> Any:
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden_TD, weight_VD, bias_V) if tensor is not None]
    found_T = function(leaves[0], leaves[1], leaves[2] if bias_V is not None else None, tokens_T)
    (found_T * torch.linspace(-2, 3, len(tokens_T))).sum().backward()
    return [found_T.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("blocks")
def test_numbers_and_gradients_are_those_of_a_softmax_over_all_words(bias: bool) -> None:
    given = example(torch.float32, bias=bias)
    truth = gradients(plain, *(None if tensor is None else _double(tensor) for tensor in given))
    for found, true in zip(gradients(chosen_logprobs, *given), truth, strict=True):
        assert found.dtype == torch.float32
        assert (found - true).abs().max() < 1e-5 * max(1.0, float(true.abs().max()))


@pytest.mark.usefixtures("blocks")
def test_bfloat16_errs_no_more_than_the_plain_path() -> None:
    given = example(torch.bfloat16, bias=False)
    truth = gradients(plain, *(None if tensor is None else _double(tensor) for tensor in given))

    def widened(hidden_TD: Tensor, weight_VD: Tensor, _: None, tokens_T: Tensor) -> Tensor:
        logits_TV = nn.functional.linear(hidden_TD, weight_VD).float()
        return logits_TV.log_softmax(dim=-1)[torch.arange(len(tokens_T)), tokens_T]

    ours, theirs = gradients(chosen_logprobs, *given), gradients(widened, *given)
    for found, other, true in zip(ours, theirs, truth, strict=True):
        assert (found.double() - true).norm() <= 1.2 * (other.double() - true).norm() + 1e-6
    # Logits are never rounded to bfloat16, where the plain path's are.
    assert (ours[0] - truth[0]).abs().max() < 1e-4 < 1e-2 < (theirs[0] - truth[0]).abs().max()


class AskedOfTheHost(TorchDispatchMode):
    """Notes the operations whose result's shape or value the host must know before it goes on."""

    WAITS = ("nonzero", "item", "local_scalar_dense", "masked_select", "unique", "index.Tensor", "index_put")

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waited += [str(func) for name in self.WAITS if name in str(func)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("blocks")
def test_no_block_makes_a_device_wait_for_the_host(bias: bool) -> None:
    with AskedOfTheHost() as found:
        gradients(chosen_logprobs, *example(torch.float32, bias=bias))
    assert found.waited == []


def test_what_autograd_keeps_grows_with_the_hidden_states_and_not_with_the_words() -> None:
    hidden_TD, weight_VD, _, tokens_T = example(torch.float32, bias=False)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chosen_logprobs(hidden_TD.requires_grad_(), weight_VD.requires_grad_(), None, tokens_T)

    own = hidden_TD.numel() * 4 + weight_VD.numel() * 4 + tokens_T.numel() * 8 + TOKENS * 4
    assert sum(kept) == own


def model_of(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=120, num_key_value_heads=2, **sizes, **fields)).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
def test_a_model_with_the_head_gives_what_it_gave_before(tied: bool, attention: str) -> None:
    model = model_of(tie_word_embeddings=tied, attn_implementation=attention)
    ids_BL = torch.randint(5, 120, (3, 11))
    mask_BL = torch.ones_like(ids_BL)
    mask_BL[1, 6:] = 0
    wanted_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
    wanted_BL[:, 4:9] = True

    def run() -> list[Tensor]:
        model.zero_grad()
        logprobs_BL = token_logprobs(model, ids_BL, mask_BL, wanted_BL)
        (logprobs_BL * torch.arange(11)).sum().backward()
        return [logprobs_BL.detach(), *(weight.grad.clone() for weight in model.parameters())]

    names = [name for name, _ in model.named_parameters()]
    before = run()
    assert give_logprob_head(model)
    after = run()

    assert [name for name, _ in model.named_parameters()] == names
    assert (before[0] != 0).sum() == 5 + 2 + 5
    assert all(torch.allclose(one, other, atol=1e-5, rtol=1e-4) for one, other in zip(before, after, strict=True))


def test_a_saved_model_is_the_one_that_was_loaded(tmp_path: Path) -> None:
    model = model_of(tie_word_embeddings=True)
    ids_BL = torch.randint(5, 120, (2, 7))
    give_logprob_head(model)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()

    with torch.no_grad():
        assert torch.equal(again(ids_BL).logits, model(ids_BL).logits)


def test_a_model_that_changes_its_logits_keeps_its_own_layer() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Gemma2Config(vocab_size=120, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0, **sizes)
    model: PreTrainedModel = Gemma2ForCausalLM(config).eval()

    assert not give_logprob_head(model)
    assert not any(isinstance(module, LogprobHead) for module in model.modules())
    ids_BL = torch.randint(5, 120, (2, 7))
    with torch.no_grad():
        found_BL = token_logprobs(model, ids_BL, torch.ones_like(ids_BL))
        table_BLV = model(ids_BL).logits.log_softmax(dim=-1)
    expected_BL = table_BLV[:, :-1].gather(-1, ids_BL[:, 1:, None]).squeeze(-1)
    assert torch.allclose(found_BL[:, 1:], expected_BL, atol=1e-5)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
