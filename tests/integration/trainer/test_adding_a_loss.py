"""The page on adding a loss is executed: its function and its row are all that a job needs to train with a new loss."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.batches import ForwardLimits, TrainingSample, cut_into_minibatches
from services.trainer.learner import Learner
from services.trainer.ranks import Ranks
from spo.algorithm import objectives, registry
from spo.errors import InvalidInput
from spo.testing.runs import toy_spec
from spo.testing.trainer import sampled_trajectories

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

PAGE = Path(__file__).parents[3] / "docs" / "adding_a_loss.md"
NAME = "terminal_huber"


@pytest.fixture
def _huber_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    function, row = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace: dict[str, Any] = dict(vars(objectives))
    exec(function, namespace)
    monkeypatch.setattr(objectives, NAME, namespace[NAME], raising=False)
    ((name, loss),) = eval(f"{{{row}}}", dict(vars(registry))).items()
    monkeypatch.setitem(registry.LOSSES, name, loss)


def document(model_path: Path, **more: Any) -> dict[str, Any]:
    losses = [{"objective": NAME, "epsilon": 0.5}]
    trainer = {"batch_size": 8, "micro_batch_size": 3}
    return {"model": {"path": str(model_path)}, "algorithm": {"losses": losses}, "trainer": trainer, **more}


@pytest.mark.usefixtures("_huber_is_added")
def test_the_loss_of_the_page_trains_the_policy(ranks: Ranks, tiny_model_path: Path) -> None:
    spec = toy_spec(document(tiny_model_path))
    found = sampled_trajectories(tiny_model_path, 8)
    rows = [TrainingSample(each.trajectory, each.qhat_0, index // 4) for index, each in enumerate(found)]
    limits = ForwardLimits(1000, 3)
    (share,) = cut_into_minibatches(rows, 1, 1, limits, whole_groups=spec.algorithm.needs_groups)

    with closing(Learner(ranks, spec)) as learner:
        before = {name: tensor.clone() for name, tensor in learner.engine.full_parameters()}
        result = learner.learn(share, 1e-3)
        changed = any(not torch.equal(before[name], tensor) for name, tensor in learner.engine.full_parameters())

    assert (result.refused, result.updates, changed) == ("", 1, True)
    # Before the first step Q_T is Qhat_0, so that the loss is known: linear beyond epsilon.
    errors = [abs(row.qhat_0 - row.trajectory.reward) / spec.algorithm.beta for row in rows]
    assert min(errors) > 0.5
    assert result.metrics[f"loss/{NAME}"] == pytest.approx(sum(0.5 * (error - 0.25) for error in errors) / 8, rel=1e-4)


@pytest.mark.usefixtures("_huber_is_added")
def test_what_its_row_says_it_needs_is_asked_of_the_job(tiny_model_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        toy_spec(document(tiny_model_path, value=None))
    assert "/value" in [violation.pointer for violation in refused.value.violations]


def test_without_its_row_a_loss_is_unknown(tiny_model_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        toy_spec(document(tiny_model_path))
    assert refused.value.violations[0].pointer == "/algorithm/losses/0/objective"
