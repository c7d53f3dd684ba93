"""Distillation from a model of its own in the real learner: log-probs as the teacher says them, and what they teach."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.trainer.batches import ForwardLimits, ReplayClient, TrainingSample, cut_into_minibatches, token_batch
from services.trainer.controller import Follower
from services.trainer.learner import Learner
from services.trainer.lease import Attempt
from services.trainer.loop import TrainingRun
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from spo.algorithm.objectives import TokenBatch
from spo.errors import InvalidInput, NotReady
from spo.model.logprobs import load_policy, token_logprobs
from spo.rpc.client import RpcClient
from spo.spec.job_spec import JobSpec
from spo.spec.tasks import RewardSpec
from spo.testing.runs import toy_spec
from spo.testing.trainer import sampled_trajectories, write_random_llama
from spo.v1.orchestrator_service_pb2 import LeaseJobResponse
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.weights.model_folders import MadeModels

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")
RATE = 3e-3
STEPS = 30


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than the student and drawn from another seed, with the same tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    write_random_llama(folder, seed=7, width=64)
    return folder


@pytest.fixture(scope="module")
def rows(tiny_model_path: Path) -> list[TrainingSample]:
    found = sampled_trajectories(tiny_model_path, 8)
    for each in found:
        each.trajectory.source = SOURCE_ONLINE
        each.trajectory.temperature = each.trajectory.top_p = 1.0
        each.trajectory.sampling_logprobs[:] = each.trajectory.reference_logprobs
    return [TrainingSample(each.trajectory, each.qhat_0, index) for index, each in enumerate(found)]


def taught_by(model_path: Path, teacher: Path | None, **trainer: object) -> JobSpec:
    return toy_spec(
        {
            "model": {"path": str(model_path)},
            "algorithm": {
                "losses": [{"objective": "distillation", "clip": 0.9}],
                "teacher": {"path": str(teacher)} if teacher else None,
            },
            "value": None,
            "rollout": {"temperature": 1.0, "top_p": 1.0},
            "offline": {"human_solutions": False, "keep_reference_samples": False},
            "replay": {"mix": [{"source": "online", "share": 1.0}]},
            "trainer": {"batch_size": 8, "learning_rate": RATE, **trainer},
        }
    )


def batch_of(rows: Sequence[TrainingSample]) -> TokenBatch:
    return token_batch(rows, 0.1, RewardSpec())


def said(model: torch.nn.Module, rows: Sequence[TrainingSample]) -> Tensor:
    batch = batch_of(rows)
    with torch.no_grad():
        return token_logprobs(model, batch.input_ids_BL, batch.attention_mask_BL, batch.response_mask_BL)


@pytest.mark.parametrize(("stage", "micro_batch"), [(0, None), (1, 3), (3, 3)])
def test_the_first_loss_is_that_of_the_teachers_own_log_probs(
    ranks: Ranks, tiny_model_path: Path, teacher_path: Path, rows: list[TrainingSample], stage: int, micro_batch: int
) -> None:
    """Before the first update the ratio is 1: the loss is the mean of ln pi - ln pi_teacher over responses' tokens."""
    spec = taught_by(tiny_model_path, teacher_path, zero_stage=stage, micro_batch_size=micro_batch)
    student, teacher = (said(load_policy(str(path), "float32"), rows) for path in (tiny_model_path, teacher_path))
    lengths_B = batch_of(rows).response_lengths
    expected = ((student - teacher).sum(dim=1) / lengths_B).mean().item()
    limits = ForwardLimits.of(spec.trainer, packed=True)
    (share,) = cut_into_minibatches(rows, 1, 1, limits, whole_groups=False)

    with closing(Learner(ranks, spec)) as learner:
        result = learner.learn(share, RATE)

    assert result.refused == ""
    assert result.metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert abs(expected) > 0.05


def test_a_student_comes_near_its_teacher(
    ranks: Ranks, tiny_model_path: Path, teacher_path: Path, rows: list[TrainingSample]
) -> None:
    spec = taught_by(tiny_model_path, teacher_path)
    limits = ForwardLimits.of(spec.trainer, packed=True)
    with closing(Learner(ranks, spec)) as learner:
        for _ in range(STEPS):
            (share,) = cut_into_minibatches(rows, 1, 1, limits, whole_groups=False)
            assert not learner.learn(share, RATE).refused
        after = said(learner.engine.model, rows)
    before, teacher = (said(load_policy(str(path), "float32"), rows) for path in (tiny_model_path, teacher_path))
    mask = teacher != 0
    liked = mask & (teacher > before)

    # What the teacher likes better has become likelier, what it likes less has not.
    assert (after - before)[liked].mean() > (after - before)[mask & ~liked].mean() + 0.1
    assert (after - teacher)[mask].abs().mean() < (before - teacher)[mask].abs().mean()


def test_a_teacher_that_a_fork_made_is_fetched_and_a_disk_that_cannot_take_it_is_told_on_every_rank(
    ranks: Ranks, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, wanted = tmp_path / "models" / "job", list[str]()

    def here(models: MadeModels, path: str) -> Path:
        wanted.append(path)
        if Path(path) == teacher:
            raise PermissionError(f"{path} is not writable")
        return Path(path)

    monkeypatch.setattr(MadeModels, "here", here)
    spec = taught_by(tiny_model_path, teacher)
    told = Settings(state_path=tmp_path)
    follower = Follower(ranks, ReplayClient(RpcClient("replay-buffer", "127.0.0.1:1", ReplayServiceStub), "job", spec))
    run = TrainingRun(ranks, told, LeaseJobResponse(), spec, follower, Attempt(ranks, LeaseJobResponse(), tmp_path))

    with pytest.raises(NotReady, match="not writable"):
        run.carry_out()
    assert wanted == [str(tiny_model_path), str(teacher)]


def test_a_teacher_that_cannot_be_loaded_is_told(ranks: Ranks, tiny_model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be"):
        Learner(ranks, taught_by(tiny_model_path, tmp_path / "absent"))
