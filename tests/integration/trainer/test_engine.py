"""What the trainer relies on in DeepSpeed's internals, at every ZeRO stage of the pinned version."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from services.trainer.deepspeed_engine import DeepSpeedEngine
from services.trainer.learner import load_model
from services.trainer.ranks import Ranks
from spo.model.logprobs import load_policy, token_logprobs
from spo.spec.job_spec import TrainerSpec, parse_job_spec
from tests.integration.trainer.trainer_bench import STAGES

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

OF_STAGES = pytest.mark.parametrize("stage", STAGES)
TOKENS_BL = torch.arange(4, 28).reshape(2, 12)


@contextmanager
def engine_for(path: Path, stage: int, dtype: str = "float32") -> Iterator[DeepSpeedEngine]:
    engine = DeepSpeedEngine(load_policy(path, dtype), TrainerSpec(zero_stage=stage), passes=2)
    yield engine
    engine.close()


def nll(engine: DeepSpeedEngine, tokens_BL: Tensor) -> Tensor:
    return -token_logprobs(engine.model, tokens_BL, torch.ones_like(tokens_BL)).mean()


def full_step(engine: DeepSpeedEngine) -> float | None:
    engine.backward(nll(engine, TOKENS_BL[:1]), last=False)
    engine.backward(nll(engine, TOKENS_BL[1:]), last=True)
    return engine.step(learning_rate=1e-2)


def parameters(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_parameters()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@OF_STAGES
def test_discarded_gradients_leave_no_trace(ranks: Ranks, tiny_model_path: Path, stage: int) -> None:
    with engine_for(tiny_model_path, stage) as engine:
        norms = [full_step(engine), full_step(engine)]
        expected = parameters(engine)
    with engine_for(tiny_model_path, stage) as engine:
        observed = [full_step(engine)]
        engine.backward(5 * nll(engine, TOKENS_BL.flip(1)), last=False)
        nll(engine, TOKENS_BL)  # A forward whose loss was refused.
        engine.discard_gradients()
        observed.append(full_step(engine))

        assert observed == norms
        assert equal(parameters(engine), expected)


@OF_STAGES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_run_twice_learn_the_same_from_less_memory(
    ranks: Ranks, tiny_model_path: Path, stage: int, dtype: str
) -> None:
    found: list[tuple[float, dict[str, Tensor]]] = []
    kept: list[int] = []
    for twice in (False, True):
        spec = TrainerSpec(zero_stage=stage, activation_checkpointing=twice)
        engine = DeepSpeedEngine(load_policy(tiny_model_path, dtype), spec, passes=2)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_counted, sizes), lambda tensor: tensor):
            loss = nll(engine, TOKENS_BL[:1])
        engine.backward(loss, last=False)
        engine.backward(nll(engine, TOKENS_BL[1:]), last=True)
        norm = engine.step(learning_rate=1e-2)
        assert norm is not None
        found.append((norm, parameters(engine)))
        kept.append(sum(sizes))
        engine.close()

    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert all(torch.allclose(one, found[1][1][name], atol=1e-6) for name, one in found[0][1].items())
    assert kept[1] < 0.7 * kept[0]


def _counted(sizes: list[int], tensor: Tensor) -> Tensor:
    sizes.append(tensor.numel())
    return tensor


def added_up(path: Path, stage: int, gradient_dtype: Any) -> float:
    """How far the gradient of 64 micro-batches is from their sum in float32, as a share of it."""
    rows = torch.randint(4, 60, (64, 8), generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(-1, 1, 64)
    plain = load_policy(path, "bfloat16")
    true: dict[str, Tensor] = {}
    for row, weight in zip(rows, weights, strict=True):
        plain.zero_grad()
        (token_logprobs(plain, row[None], torch.ones_like(row[None])).sum() * weight).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            true[name] = true.get(name, 0) + parameter.grad.float()
    engine = DeepSpeedEngine(
        load_policy(path, "bfloat16"), TrainerSpec(zero_stage=stage, gradient_dtype=gradient_dtype), passes=64
    )
    for index, row in enumerate(rows):
        loss = token_logprobs(engine.model, row[None], torch.ones_like(row[None])).sum() * weights[index]
        engine.backward(loss, last=index == 63)
    found = {name: safe_get_full_grad(parameter) for name, parameter in engine.model.module.named_parameters()}
    distance = sum(float((found[name].float() - grad).norm() ** 2) for name, grad in true.items())
    assert engine.step(learning_rate=1e-2)
    engine.close()
    return (distance / sum(float(grad.norm() ** 2) for grad in true.values())) ** 0.5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_added_up_in_float32_where_that_is_asked_for(
    ranks: Ranks, tiny_model_path: Path, stage: int
) -> None:
    assert added_up(tiny_model_path, stage, "float32") < 1e-5
    assert added_up(tiny_model_path, stage, "model") > 1e-3


@OF_STAGES
def test_a_gradient_that_is_not_finite_updates_nothing(ranks: Ranks, tiny_model_path: Path, stage: int) -> None:
    with engine_for(tiny_model_path, stage) as engine:
        full_step(engine)
        before = parameters(engine)
        loss = nll(engine, TOKENS_BL)
        # sqrt at 0: a finite value whose slope is infinite.
        poisoned = loss + (loss - loss.detach()).abs().sqrt()
        assert torch.isfinite(poisoned)
        engine.backward(poisoned, last=True)

        assert engine.step(learning_rate=1e-2) is None
        assert equal(parameters(engine), before)
        assert full_step(engine) is not None
        assert not equal(parameters(engine), before)


@OF_STAGES
def test_matrices_decay_and_norms_do_not(ranks: Ranks, tiny_model_path: Path, stage: int) -> None:
    spec = TrainerSpec(zero_stage=stage, weight_decay=0.5)
    engine = DeepSpeedEngine(load_policy(tiny_model_path, "float32"), spec, passes=1)
    before = parameters(engine)
    # A loss without slopes: what changes, decay has changed.
    engine.backward(0.0 * nll(engine, TOKENS_BL), last=True)
    engine.step(learning_rate=0.1)
    after = parameters(engine)
    engine.close()

    for name, tensor in before.items():
        assert torch.allclose(after[name], tensor * (0.95 if tensor.ndim > 1 else 1.0), atol=1e-6), name


@OF_STAGES
def test_loaded_state_continues_exactly(ranks: Ranks, tiny_model_path: Path, stage: int) -> None:
    with engine_for(tiny_model_path, stage) as engine:
        full_step(engine)
        saved = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
        full_step(engine)
        expected = parameters(engine)
    with engine_for(tiny_model_path, stage) as engine:
        engine.load_state_tensors(saved)
        full_step(engine)

        assert equal(parameters(engine), expected)


@OF_STAGES
def test_bfloat16_trains_on_float32_master_weights(ranks: Ranks, tiny_model_path: Path, stage: int) -> None:
    with engine_for(tiny_model_path, stage, "bfloat16") as engine:
        first = nll(engine, TOKENS_BL).item()
        for _ in range(5):
            assert full_step(engine) is not None

        assert engine.state_tensors()["master.0"].dtype == torch.float32
        assert all(tensor.dtype == torch.bfloat16 for tensor in parameters(engine).values())
        assert nll(engine, TOKENS_BL).item() < first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "optimizer_and_parameters")],
)
def test_what_the_cpu_holds_for_the_device_learns_the_same(
    ranks: Ranks, tiny_model_path: Path, stage: int, offload: Any, dtype: Any
) -> None:
    model = {"path": str(tiny_model_path), "dtype": dtype}
    found = []
    for where in ("none", offload):
        spec = parse_job_spec({"model": model, "trainer": {"zero_stage": stage, "offload": where}})
        engine = DeepSpeedEngine(load_model(spec, ranks.device), spec.trainer, passes=2)
        norms = [full_step(engine)]
        engine.backward(5 * nll(engine, TOKENS_BL.flip(1)), last=False)
        engine.discard_gradients()
        saved = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
        norms.append(full_step(engine))
        found.append((norms, parameters(engine)))
        engine.load_state_tensors(saved)
        assert full_step(engine) == norms[1]
        assert equal(parameters(engine), found[-1][1])
        engine.close()

    (plain_norms, plain), (norms, offloaded) = found
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    assert all(torch.allclose(plain[name], tensor, atol=1e-4) for name, tensor in offloaded.items())


def live_storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process holds, by its address."""
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        # Engines of other tests leave fake tensors behind, which have no storage and say so by RuntimeError.
        if type(each) in (Tensor, torch.nn.Parameter):
            with contextlib.suppress(RuntimeError):
                storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return storages


@OF_STAGES
def test_a_closed_engine_frees_its_model_and_optimiser(ranks: Ranks, tiny_model_path: Path, stage: int) -> None:
    # What other tests of this process left is none of this engine's.
    before = live_storages()

    def own_bytes() -> int:
        return sum(size for address, size in live_storages().items() if address not in before)

    with engine_for(tiny_model_path, stage) as engine:
        full_step(engine)
        model_bytes = sum(tensor.nbytes for tensor in parameters(engine).values())
        assert own_bytes() > 2 * model_bytes

    assert own_bytes() < 0.1 * model_bytes
