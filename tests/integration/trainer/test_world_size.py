"""Training state that two ranks wrote goes on with one, and the other way round, with the same next step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.trainer.ranks import Ranks
from spo.errors import IntegrityError
from spo.weights.store import WeightStore
from tests.integration.trainer.two_rank_steps import INTERVALS, STAGES, engine_for, save_state, step

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

LIMIT_SECONDS = 240


@pytest.fixture(scope="module")
def steps(ranks: Ranks, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Parameters after the third step, by who made the first two, who the third, and the parameter."""
    folder = tmp_path_factory.mktemp("steps")
    found: dict[str, Tensor] = {}

    def note(name: str, parameters: dict[str, Tensor]) -> None:
        found.update({f"{name}:{key}": tensor.clone() for key, tensor in parameters.items()})

    for stage in STAGES:
        engine = engine_for(tiny_model_path, stage)
        step(engine)
        step(engine)
        save_state(engine, folder / f"one-{stage}", 0)
        step(engine)
        note(f"one-one-{stage}", dict(engine.full_parameters()))
        engine.close()
    program = Path(__file__).with_name("two_rank_steps.py")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1"]
    command = [sys.executable, *launcher, str(program), str(tiny_model_path), str(folder)]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
    for stage in STAGES:
        note(f"two-two-{stage}", load_file(folder / f"two-{stage}-next.safetensors"))
        for name in INTERVALS:
            stored = WeightStore(folder / name, cache_path=str(folder / "reader")).open("job", stage + 1)
            note(f"{name}-{stage}", {key: part for file in stored.files for key, part in load_file(file).items()})
            assert "delta" in stored.manifest or name == "whole" or stage == 0
        wrote = [json.loads((folder / f"wrote-{stage}-{rank}.json").read_text()) for rank in range(2)]
        assert all(wrote)
        assert not set(wrote[0]) & set(wrote[1])
    assert all(WeightStore(folder / name).versions("job") == [1, 2, 3, 4] for name in INTERVALS)
    for stage in STAGES:
        note(f"one-two-{stage}", load_file(folder / f"one-{stage}-by-two.safetensors"))
        engine = engine_for(tiny_model_path, stage)
        engine.load_state_tensors(engine.reshard(sorted((folder / f"two-{stage}").iterdir()), "", ranks))
        step(engine)
        note(f"two-one-{stage}", dict(engine.full_parameters()))
        engine.close()
    return found


@pytest.mark.cpu_seconds(150)  # the first one starts two ranks for all of them
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["one-two", "two-one"])
def test_the_next_step_is_the_same_with_another_number_of_ranks(steps: dict[str, Tensor], stage: int, way: str) -> None:
    stayed = way.split("-")[0]
    names = [name.partition(":")[2] for name in steps if name.startswith(f"{way}-{stage}:")]

    assert len(names) > 5
    for name in names:
        went_on, expected = steps[f"{way}-{stage}:{name}"], steps[f"{stayed}-{stayed}-{stage}:{name}"]
        torch.testing.assert_close(went_on, expected, rtol=0, atol=1e-4)


@pytest.mark.timeout(400)
@pytest.mark.cpu_seconds(150)  # or this one, on the days that leave the other out
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("store", INTERVALS)
def test_a_version_that_two_ranks_wrote_holds_every_parameter(steps: dict[str, Tensor], stage: int, store: str) -> None:
    own = {name.partition(":")[2]: tensor for name, tensor in steps.items() if name.startswith(f"two-two-{stage}:")}
    stored = {name.partition(":")[2]: tensor for name, tensor in steps.items() if name.startswith(f"{store}-{stage}:")}

    assert own.keys() == stored.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in stored.items())


def test_the_state_of_another_model_is_refused(ranks: Ranks, tiny_model_path: Path, tmp_path: Path) -> None:
    from spo.testing.trainer import write_random_llama

    write_random_llama(tmp_path / "wider", seed=0, width=64)
    engine = engine_for(tmp_path / "wider", 1)
    step(engine)
    path = save_state(engine, tmp_path / "state", 0)
    engine.close()
    engine = engine_for(tiny_model_path, 3)

    with pytest.raises(IntegrityError, match="other parameters"):
        engine.reshard([path, path], "", ranks)
    engine.close()
