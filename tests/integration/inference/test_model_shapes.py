"""Known families of models through the whole way: load, write prompts, sample, train, publish, serve, export."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.inference.weights import PolicyVersions, reference_weights
from services.trainer.batches import ForwardLimits, TrainingSample, cut_into_minibatches
from services.trainer.deepspeed_engine import take_weights
from services.trainer.learner import Learner
from services.trainer.ranks import Ranks
from services.trainer.weights import NewVersion, store_weights
from spo.model.chat import ChatFormat
from spo.model.folder import inspect_model_folder
from spo.model.logprobs import load_policy, response_logprobs
from spo.model.tokenizer import decode_response, encode_prompt, encode_response, end_tokens, load_tokenizer
from spo.testing.runs import toy_spec
from spo.testing.trainer import sampled_trajectories
from spo.weights.model_folders import model_of_version
from spo.weights.store import StoredVersion, WeightStore
from tests.integration.inference.model_shapes import SHAPES, ModelShape, write_shape
from tests.support.budget import sampled

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

RUN = "job_shape"
STEPS = 3
STATEMENT = "print the sum of two numbers"
TEXT = "def main(): print(2)"
# What two implementations in float32 may differ by, at a token.
TOLERANCE = 2e-4
ENGINE_SECONDS = 400


@dataclass(frozen=True)
class Family:
    shape: ModelShape
    folder: Path
    tokenizer: Any
    prompt: list[int]

    def id_of(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    @property
    def ends(self) -> tuple[int, ...]:
        return end_tokens(self.tokenizer, inspect_model_folder(self.folder).end_token_ids, ChatFormat())


# An engine takes half a minute: a run has those of two families.
WITH_ENGINE = sampled(list(SHAPES), 2, lambda _: ["tests/integration/inference/model_shapes.py"])


@pytest.fixture(scope="module", params=SHAPES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder, shape = tmp_path_factory.mktemp("shapes") / "model", SHAPES[request.param]
    write_shape(folder, shape)
    tokenizer = load_tokenizer(folder)
    return Family(shape, folder, tokenizer, encode_prompt(tokenizer, STATEMENT))


def test_every_end_token_of_the_family_ends_a_response(family: Family) -> None:
    shape = family.shape
    assert set(family.ends) == {family.id_of(token) for token in (shape.eos, shape.turn_end, *shape.file_ends)}

    response = encode_response(family.tokenizer, TEXT)

    assert response[-1] == family.id_of(shape.turn_end)
    assert decode_response(family.tokenizer, response) == TEXT


def test_the_prompt_is_what_the_library_writes(family: Family) -> None:
    turn = [{"role": "user", "content": STATEMENT}]
    theirs = family.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    assert family.prompt == list(theirs)


def trained(family: Family, ranks: Ranks, store: WeightStore) -> StoredVersion:
    """A version after some steps of the real learner, every tensor of which has learned."""
    found = sampled_trajectories(family.folder, 8)
    rows = [TrainingSample(each.trajectory, each.qhat_0, index // 4) for index, each in enumerate(found)]
    trainer = {"batch_size": len(rows), "micro_batch_size": 4}
    losses = [{"objective": "terminal_squared"}]
    spec = toy_spec({"model": {"path": str(family.folder)}, "algorithm": {"losses": losses}, "trainer": trainer})
    (share,) = cut_into_minibatches(rows, 1, 1, ForwardLimits(1000, 4), whole_groups=False)
    with closing(Learner(ranks, spec)) as learner:
        for _ in range(STEPS):
            assert learner.learn(share, 3e-3).refused == ""
        new = NewVersion(RUN, 1, parent=0, step=STEPS, epoch=1)
        stored = store_weights(ranks, learner.engine, store, new).version
    assert stored
    before = tensors_by_name(inspect_model_folder(family.folder).safetensors_files)
    after = tensors_by_name(stored.files)
    assert not [name for name, tensor in after.items() if torch.equal(tensor, before[name])], "routers learn too"
    assert PolicyVersions(store, reference_weights(family.folder, "hash")).resolve(RUN, 1).paths == stored.files
    return stored


def tensors_by_name(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def sampled(family: Family, stored: StoredVersion) -> dict[str, Any]:
    request = {"folder": str(family.folder), "weights": [str(file) for file in stored.files]}
    request |= {"prompt": family.prompt, "ends": list(family.ends), "manifest": stored.manifest}
    command = [sys.executable, "-m", "tests.integration.inference.sampled_versions", json.dumps(request)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False)
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("SAMPLED ")] or [ran.stderr[-3000:]]
    found: dict[str, Any] = json.loads(line.removeprefix("SAMPLED "))
    return found


def difference(family: Family, model: Any, samples: list[dict[str, Any]]) -> float:
    """The largest difference of a token's log-prob between the engine and our forward."""
    responses = [sample["token_ids"] for sample in samples]
    ours = response_logprobs(model, [family.prompt] * len(responses), responses, 4096)
    theirs = [logprob for sample in samples for logprob in sample["logprobs"]]
    own = [logprob for logprobs in ours for logprob in logprobs]
    return max(abs(one - other) for one, other in zip(theirs, own, strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", WITH_ENGINE, indirect=True)
def test_trainer_and_engine_agree_before_and_after_training(family: Family, ranks: Ranks, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    stored = trained(family, ranks, store)
    found = sampled(family, stored)
    model = load_policy(family.folder, "float32")

    assert difference(family, model, found["before"]) < TOLERANCE
    assert difference(family, model, found["after"]) > 10 * TOLERANCE, "the step has changed the policy"
    take_weights(model, stored.files)
    assert difference(family, model, found["after"]) < TOLERANCE
    assert found["received"] == found["after"], "by broadcast as by files"
    for sample in [*found["before"], *found["after"]]:
        assert sample["stopped"] == (sample["token_ids"][-1] in family.ends)
        assert not set(sample["token_ids"][:-1]) & set(family.ends)
    assert "config.json" in found["opened"]
    assert not [name for name in found["opened"] if name.endswith((".bin", ".pth"))]

    exported = model_of_version(family.folder, stored, tmp_path / "exported")
    assert difference(family, load_policy(exported, "float32"), found["after"]) < TOLERANCE
    assert inspect_model_folder(exported).end_token_ids == inspect_model_folder(family.folder).end_token_ids
