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


def test_a_teacher_whom_no_term_asks_is_refused() -> None:
    teacher = {"path": "/models/teacher"}
    assert "/algorithm/teacher" in refused_fields(algorithm("terminal_squared", teacher=teacher))
    rollout = {"temperature": 1.0, "top_p": 1.0}
    document = {**algorithm("distillation", teacher=teacher), "replay": ONLINE, "rollout": rollout}
    offline = {"human_solutions": False, "keep_reference_samples": False}
    spec = parse_job_spec({**MODEL, **document, "offline": offline, "value": None})
    assert spec.model_paths == {"/model/path": spec.model.path, "/algorithm/teacher/path": "/models/teacher"}


def test_minibatches_that_do_not_divide_the_batch_are_refused() -> None:
    assert "/trainer/minibatches" in refused_fields({"trainer": {"batch_size": 64, "minibatches": 3}})


@pytest.mark.parametrize("objective", ["ppo", "gspo", "distillation", "policy_gradient"])
def test_importance_weights_of_tempered_rollouts_are_refused(objective: str) -> None:
    rollout = {"temperature": [0.1, 1.0], "top_p": 0.95}
    document = {**algorithm(objective), "replay": {**ONLINE, "unit": "group"}, "rollout": rollout}

    fields = refused_fields(document)

    assert {"/rollout/temperature", "/rollout/top_p"} <= fields.keys()


def test_a_term_that_weighs_no_online_trajectory_says_nothing_of_how_they_are_sampled() -> None:
    document = {"rollout": {"temperature": 0.5}, **algorithm("terminal_squared")}
    assert parse_job_spec({**MODEL, **document}).rollout.temperature == 0.5


def test_only_one_term_may_normalise_over_the_batch() -> None:
    losses = [{"objective": "reinforce_plus_plus"}, {"objective": "dr_grpo", "normalise": "batch"}]
    document = {"algorithm": {"losses": losses}, "replay": {**ONLINE, "unit": "group"}}

    assert "/algorithm/losses/1/normalise" in refused_fields(document)


def test_a_form_that_compares_groups_does_not_normalise_over_the_batch() -> None:
    losses = [{"objective": "group_centred_squared", "normalise": "batch"}]
    document = {"algorithm": {"losses": losses}, "replay": {**ONLINE, "unit": "group"}}

    assert "/algorithm/losses/0/normalise" in refused_fields(document)


def test_dpo_on_offline_trajectories_that_do_not_come_in_pairs_is_refused() -> None:
    reference = {"source": "reference", "share": 1.0}

    fields = refused_fields({**algorithm("dpo"), "replay": {"mix": [reference]}})
    paired = parse_job_spec({**MODEL, **algorithm("dpo"), "replay": {"mix": [{**reference, "sampler": "pairs"}]}})

    assert "pairs" in fields["/replay/mix/0/sampler"]
    assert paired.algorithm.needs_groups


@pytest.mark.parametrize(
    ("part", "pointer"),
    [
        ({"source": "online", "sampler": "pairs"}, "sampler"),
        ({"source": "reference", "sampler": "pairs", "correct_only": True}, "sampler"),
        ({"source": "reference", "age_half_life": 3.0}, "age_half_life"),
        ({"source": "online", "sampler": "per_prompt", "age_half_life": 3.0}, "age_half_life"),
        ({"source": "online", "contrast_only": True}, "contrast_only"),
    ],
)
def test_a_rule_of_sampling_that_a_source_cannot_keep_is_refused(part: dict[str, Any], pointer: str) -> None:
    assert f"/replay/mix/0/{pointer}" in refused_fields({"replay": {"mix": [{**part, "share": 1.0}]}})


def test_rewards_that_are_compared_with_values_are_not_shaped() -> None:
    shaped = {"overlong": {"kind": "shape", "buffer_tokens": 4096}}

    fields = refused_fields(algorithm("terminal_squared", **shaped))

    assert {"/algorithm/overlong/kind", "/algorithm/overlong/buffer_tokens"} <= fields.keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_toy_contest_is_a_valid_job(recipe: Path) -> None:
    document = yaml.safe_load(recipe.read_text())

    spec = parse_job_spec({**document, "model": {**document["model"], "path": "/models/pi0"}})

    assert spec.name == recipe.stem
