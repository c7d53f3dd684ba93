"""The one forward of trainer and reference: right numbers, whatever the padding and the batch."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from spo.errors import InvalidInput
from spo.model.logprobs import load_policy, response_logprobs, token_logprobs
from spo.model.tokenizer import encode_prompt, encode_response, load_tokenizer
from spo.testing.trainer import write_random_llama

LENGTHS = (3, 17, 9, 30, 30, 2, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "llama"
    write_random_llama(path, seed=0)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return load_policy(folder, "float32")


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(5, 120) for _ in range(length)] for length in LENGTHS]


def naive_logprobs(model: LlamaForCausalLM, sequence: list[int]) -> list[float]:
    """One sequence, no padding, float64 log-softmax over the whole vocabulary."""
    with torch.no_grad():
        logits_LV = model(torch.tensor([sequence])).logits[0].double()
    table_LV = logits_LV.log_softmax(dim=-1)
    return [0.0, *(float(table_LV[index - 1, sequence[index]]) for index in range(1, len(sequence)))]


def padded(sequences: list[list[int]], side: str, extra: int = 0) -> tuple[Tensor, Tensor]:
    length = max(map(len, sequences)) + extra
    ids, masks = [], []
    for sequence in sequences:
        # Padding holds an ordinary token: only the mask may tell it apart.
        filler, blank = [7] * (length - len(sequence)), [0] * (length - len(sequence))
        ones = [1] * len(sequence)
        ids.append(sequence + filler if side == "right" else filler + sequence)
        masks.append(ones + blank if side == "right" else blank + ones)
    return torch.tensor(ids), torch.tensor(masks)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("extra", [0, 13])
def test_a_padded_batch_equals_a_loop_over_single_sequences(
    model: LlamaForCausalLM, sequences: list[list[int]], side: str, extra: int
) -> None:
    ids_BL, mask_BL = padded(sequences, side, extra)
    with torch.no_grad():
        logprobs_BL = token_logprobs(model, ids_BL, mask_BL)
    assert logprobs_BL.shape == ids_BL.shape
    assert logprobs_BL.dtype == torch.float32
    for row, sequence in enumerate(sequences):
        found = logprobs_BL[row][mask_BL[row].bool()].tolist()
        assert found == pytest.approx(naive_logprobs(model, sequence), abs=1e-5)
    assert (logprobs_BL[~mask_BL.bool()] == 0).all()


def test_gradients_do_not_depend_on_padding(model: LlamaForCausalLM, sequences: list[list[int]]) -> None:
    gradients = []
    for side, extra in (("right", 0), ("right", 9), ("left", 5)):
        model.zero_grad()
        token_logprobs(model, *padded(sequences, side, extra)).sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    model.zero_grad()
    assert torch.isfinite(gradients[0]).all()
    scale = gradients[0].abs().max()
    for other in gradients[1:]:
        assert (other - gradients[0]).abs().max() < 1e-5 * scale


@pytest.mark.parametrize("max_tokens_per_batch", [1, 40, 10_000])
def test_response_logprobs_equal_the_naive_loop_in_any_batching(
    model: LlamaForCausalLM, sequences: list[list[int]], max_tokens_per_batch: int
) -> None:
    prompts = [sequence[: len(sequence) // 2] for sequence in sequences]
    responses = [sequence[len(sequence) // 2 :] for sequence in sequences]
    found = response_logprobs(model, prompts, responses, max_tokens_per_batch)
    for prompt, sequence, logprobs in zip(prompts, sequences, found, strict=True):
        assert logprobs == pytest.approx(naive_logprobs(model, sequence)[len(prompt) :], abs=1e-5)


def test_what_is_not_trained_gets_0_and_the_rest_is_what_it_was(
    model: LlamaForCausalLM, sequences: list[list[int]]
) -> None:
    prompts = [sequence[: len(sequence) // 2] for sequence in sequences]
    responses = [sequence[len(sequence) // 2 :] for sequence in sequences]
    trained = [None, *([number % 3 != 1 for number in range(len(response))] for response in responses[1:])]
    whole = response_logprobs(model, prompts, responses, 64)
    found = response_logprobs(model, prompts, responses, 64, trained)
    assert found[0] == whole[0]
    for mask, every, some in zip(trained[1:], whole[1:], found[1:], strict=True):
        assert mask is not None
        expected = [logprob if wanted else 0.0 for wanted, logprob in zip(mask, every, strict=True)]
        assert some == pytest.approx(expected, abs=1e-6)


def test_no_responses_and_empty_responses_need_no_special_care(model: LlamaForCausalLM) -> None:
    assert response_logprobs(model, [], [], 100) == []
    assert response_logprobs(model, [[1, 2]], [[]], 100) == [[]]


def test_prompts_and_responses_must_be_as_many(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="shorter"):
        response_logprobs(model, [[1, 2], [1]], [[3]], 100)


def test_a_low_precision_model_still_gives_normalised_float32_logprobs(folder: Path) -> None:
    model = load_policy(folder, "bfloat16")
    vocabulary = model.config.vocab_size
    ids_BL = torch.tensor([[5, 9, token] for token in range(vocabulary)])
    with torch.no_grad():
        logprobs_BL = token_logprobs(model, ids_BL, torch.ones_like(ids_BL))
    assert logprobs_BL.dtype == torch.float32
    assert float(logprobs_BL[:, 2].logsumexp(dim=0)) == pytest.approx(0.0, abs=1e-5)


def test_loaded_policies_are_in_evaluation_mode_and_of_the_asked_precision(folder: Path) -> None:
    model = load_policy(folder, "bfloat16")
    assert not model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_a_folder_of_pickled_weights_is_never_opened(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (copy / file.name).write_bytes(file.read_bytes())
    (copy / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(InvalidInput):
        load_policy(copy, "float32")
    with pytest.raises(InvalidInput):
        load_tokenizer(copy)


def test_a_tokenizer_without_a_template_encodes_plain_text(folder: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
    with_template = encode_prompt(tokenizer, "sum of the numbers")
    tokenizer.chat_template = None
    assert encode_prompt(tokenizer, "sum of the numbers") == with_template[1:-1]


def test_a_response_ends_with_the_end_of_sequence_token(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert encode_response(tokenizer, "print(1)")[-1] == tokenizer.eos_token_id
