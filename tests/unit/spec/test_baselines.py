"""What the baselines need is asked for at submit, by the field that lacks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from spo.errors import InvalidInput
from spo.spec.job_spec import parse_job_spec

MODEL = {"model": {"path": "/models/pi0"}}
RECIPES = sorted((Path(__file__).parents[3] / "deploy" / "recipes" / "toy").glob("*.yaml"))
ONLINE = {"mix": [{"source": "online", "share": 1.0}]}
HALF = {"mix": [{"source": "online", "share": 0.5}, {"source": "reference", "share": 0.5, "correct_only": True}]}


def algorithm(objective: str, **rest: Any) -> dict[str, Any]:
    return {"algorithm": {"losses": [{"objective": objective}], **rest}}


def refused_fields(document: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InvalidInput) as caught:
        parse_job_spec({**MODEL, **document})
    return {violation.pointer: violation.message for violation in caught.value.violations}


@pytest.mark.parametrize("objective", ["ppo", "grpo", "policy_gradient"])
def test_importance_weights_on_trajectories_without_the_samplers_logprobs_are_refused(objective: str) -> None:
    document = {**algorithm(objective), "replay": {**HALF, "unit": "group"}}

    fields = refused_fields(document)

    assert "reference" in fields["/algorithm/losses/0/sources"]


def test_grpo_with_one_sample_per_prompt_is_refused() -> None:
    document = {**algorithm("grpo"), "replay": {**ONLINE, "unit": "group"}, "rollout": {"samples_per_prompt": 1}}

    assert "/rollout/samples_per_prompt" in refused_fields(document)


def test_grpo_on_batches_that_break_groups_up_is_refused() -> None:
    assert "/replay/unit" in refused_fields({**algorithm("grpo"), "replay": ONLINE})


@pytest.mark.parametrize("objective", ["monte_carlo_squared", "monte_carlo_cross_entropy"])
def test_monte_carlo_targets_without_annotated_trajectories_are_refused(objective: str) -> None:
    assert "annotated" in refused_fields(algorithm(objective))["/algorithm/losses/0/objective"]


def test_ppo_without_a_critic_is_refused() -> None:
    assert "/algorithm/critic" in refused_fields({**algorithm("ppo"), "replay": ONLINE})


def test_a_critic_without_ppo_is_refused() -> None:
    assert "/algorithm/critic" in refused_fields(algorithm("terminal_squared", critic={}))


def test_minibatches_that_do_not_divide_the_batch_are_refused() -> None:
    assert "/trainer/minibatches" in refused_fields({"trainer": {"batch_size": 64, "minibatches": 3}})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_toy_contest_is_a_valid_job(recipe: Path) -> None:
    document = yaml.safe_load(recipe.read_text())

    spec = parse_job_spec({**document, "model": {**document["model"], "path": "/models/pi0"}})

    assert spec.name == recipe.stem
