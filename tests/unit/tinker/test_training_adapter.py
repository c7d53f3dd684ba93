"""Adapters on one model: their gradients, AdamW, and that none knows of the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from services.tinker.shared_model import LoraShape, SharedModel, TrainingAdapter
from spo.errors import InvalidInput, NotReady
from spo.v1 import tinker_service_pb2 as wire

IDS = [15, 5, 6, 27, 7, 9, 11]


def _tensor(values: list[float], dtype: str = "<f4") -> wire.TinkerTensor:
    kind = wire.TINKER_DTYPE_FLOAT32 if dtype == "<f4" else wire.TINKER_DTYPE_INT64
    return wire.TinkerTensor(dense=np.array(values, dtype=dtype).tobytes(), dtype=kind, shape=[len(values)])


def asked(*rows: list[int], loss: str = "cross_entropy", **inputs: list[float]) -> wire.TinkerForwardBackwardRequest:
    """Next-token data of these rows; weights of 1 unless inputs are given."""
    request = wire.TinkerForwardBackwardRequest(loss_fn=loss)
    for row in rows:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(row[:-1], dtype="<i4").tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(_tensor([float(each) for each in row[1:]], "<i8"))
        for name, values in (inputs or {"weights": [1.0] * (len(row) - 1)}).items():
            datum.loss_fn_inputs[name].CopyFrom(_tensor(values))
    return request


def stepping(rate: float = 1e-2, **more: float) -> wire.StepTinkerOptimizer:
    return wire.StepTinkerOptimizer(**{"learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, **more})


def nothing() -> None:
    return


def logprobs(output: wire.TinkerForwardBackwardOutput) -> np.ndarray:
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")


@pytest.fixture
def adapter(shared: SharedModel) -> Iterator[TrainingAdapter]:
    made = TrainingAdapter(shared, "one", LoraShape(8), seed=1, tokens_per_pass=64)
    yield made
    made.close()


def test_a_new_adapter_says_what_the_model_says(shared: SharedModel, adapter: TrainingAdapter) -> None:
    found = adapter.forward_backward(asked(IDS), nothing)
    shared.use(None)
    with torch.no_grad():
        ids_BL = torch.tensor([IDS[:-1]])
        plain = shared.model(input_ids=ids_BL).logits[0].log_softmax(-1)
    expected = plain[range(len(IDS) - 1), IDS[1:]].numpy()
    np.testing.assert_allclose(logprobs(found), expected, atol=1e-5)
    assert found.metrics["loss:sum"] == pytest.approx(-expected.sum(), rel=1e-5)


def test_one_request_of_two_data_is_as_good_as_two_of_one(shared: SharedModel) -> None:
    steps = []
    for requests in ([asked(IDS, IDS[:4])], [asked(IDS), asked(IDS[:4])]):
        adapter = TrainingAdapter(shared, "each", LoraShape(4), seed=3, tokens_per_pass=6)
        for request in requests:
            adapter.forward_backward(request, nothing)
        steps.append((adapter.step(stepping())["unclipped_grad_l2:mean"], adapter.tensors()))
        adapter.close()
    assert steps[0][0] == pytest.approx(steps[1][0], rel=1e-4)
    for name, tensor in steps[0][1].items():
        torch.testing.assert_close(tensor, steps[1][1][name], atol=1e-5, rtol=1e-3)


def test_a_step_is_that_of_torchs_adamw(shared: SharedModel, adapter: TrainingAdapter) -> None:
    before = adapter.tensors()
    adapter.forward_backward(asked(IDS), nothing)
    gradients = [gradient.clone() for gradient in adapter._gradients or []]
    own = [tensor.clone().requires_grad_() for tensor in before.values()]
    reference = torch.optim.AdamW(own, lr=3e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for parameter, gradient in zip(own, gradients, strict=True):
        parameter.grad = gradient / norm
    reference.step()
    adapter.step(stepping(3e-3, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0))
    for parameter, tensor in zip(own, adapter.tensors().values(), strict=True):
        torch.testing.assert_close(parameter.detach(), tensor)


def test_training_one_adapter_changes_no_other_and_not_the_model(shared: SharedModel, adapter: TrainingAdapter) -> None:
    other = TrainingAdapter(shared, "other", LoraShape(2, head=False), seed=2, tokens_per_pass=64)
    first, base = other.tensors(), {name: each.clone() for name, each in shared.model.state_dict().items()}
    plain = logprobs(other.forward_backward(asked(IDS), nothing))
    for _ in range(3):
        adapter.forward_backward(asked(IDS), nothing)
        adapter.step(stepping())
    after = logprobs(other.forward_backward(asked(IDS), nothing))
    np.testing.assert_array_equal(plain, after)
    assert all(torch.equal(tensor, first[name]) for name, tensor in other.tensors().items())
    unchanged = [name for name in base if ".lora_" not in name]
    assert all(torch.equal(base[name], shared.model.state_dict()[name]) for name in unchanged)
    other.close()


def test_forward_only_keeps_no_gradient_and_neither_does_what_fails(adapter: TrainingAdapter) -> None:
    request = asked(IDS)
    request.forward_only = True
    adapter.forward_backward(request, nothing)

    def late() -> None:
        raise NotReady("too late")

    with pytest.raises(NotReady):
        adapter.forward_backward(asked(IDS), late)
    huge = asked(IDS, loss="importance_sampling", logprobs=[-3e38] * 6, advantages=[1.0] * 6)
    with pytest.raises(InvalidInput, match="not finite"):
        adapter.forward_backward(huge, nothing)
    assert adapter.step(stepping())["unclipped_grad_l2:mean"] == 0


def test_stored_state_goes_on_as_if_nothing_had_happened(shared: SharedModel, adapter: TrainingAdapter) -> None:
    for _ in range(2):
        adapter.forward_backward(asked(IDS), nothing)
        adapter.step(stepping())
    copy = TrainingAdapter(shared, "copy", LoraShape(8), seed=9, tokens_per_pass=64)
    copy.take(adapter.tensors(), adapter.moments(), adapter.steps)
    for each in (adapter, copy):
        each.forward_backward(asked(IDS), nothing)
        each.step(stepping())
    assert copy.steps == adapter.steps == 3
    for name, tensor in adapter.tensors().items():
        torch.testing.assert_close(tensor, copy.tensors()[name])
    copy.close()


FAULTS = {
    "a token id is outside": lambda request: (
        request.data[0]
        .model_input[0]
        .encoded_text.MergeFrom(wire.TinkerTokens(tokens=np.array([10**6] * 6, dtype="<i4").tobytes()))
    ),
    "the loss needs it": lambda request: request.data[0].loss_fn_inputs.pop("weights"),
    "for 6 tokens": lambda request: request.data[0].loss_fn_inputs["weights"].CopyFrom(_tensor([1.0])),
    "not finite": lambda request: request.data[0].loss_fn_inputs["weights"].CopyFrom(_tensor([float("nan")] * 6)),
    "no whole number": lambda request: setattr(request.data[0].loss_fn_inputs["weights"], "dense", b"123"),
    "only plain vectors": lambda request: request.data[0].loss_fn_inputs["weights"].shape.append(2),
    "only tokens of text": lambda request: setattr(request.data[0].model_input[0], "image", b"png"),
    "0 tokens": lambda request: request.data[0].ClearField("model_input"),
    "there is no data": lambda request: request.ClearField("data"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faulty_data_is_refused_with_its_place(adapter: TrainingAdapter, message: str) -> None:
    request = asked(IDS)
    FAULTS[message](request)
    with pytest.raises(InvalidInput, match=message):
        adapter.forward_backward(request, nothing)


@pytest.mark.parametrize("numbers", [{"rate": -1.0}, {"rate": float("nan")}, {"beta1": 1.0}, {"eps": float("inf")}])
def test_numbers_that_adamw_does_not_take_are_refused(adapter: TrainingAdapter, numbers: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        adapter.step(stepping(**numbers))
