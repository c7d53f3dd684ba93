"""The JobSpec refuses what cannot work and says where."""

from __future__ import annotations

from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import JobSpec, parse_job_spec, spec_from_json, spec_to_json

MODEL = {"model": {"path": "/models/pi0"}}
SCORED = {"verifier": {"kind": "http", "url": "https://rewards.example.org/score"}}


def chat(**fields: Any) -> Any:
    """A spec that writes its prompts so."""
    return {"model": {"path": "x", "chat": fields}}


def replay(fields: Any = None, **part: Any) -> Any:
    """A spec whose batches come from one source."""
    mix = [{"source": "human", "share": 1, **part}]
    return {**MODEL, "replay": {"mix": mix, **(fields or {})}}


ONLINE_AND_HUMAN = [{"source": "online", "share": 0.5}, {"source": "human", "share": 0.5}]


GRPO = [{"objective": "grpo"}]
ONLINE = {"mix": [{"source": "online", "share": 1}]}


def refreshed(interval_steps: int = 20) -> Any:
    """A spec whose reference is refreshed."""
    return {
        **MODEL,
        "algorithm": {"reference_refresh": {"interval_steps": interval_steps}},
        "trainer": {"reference": "in_trainer"},
    }


def anchored(**sections: Any) -> Any:
    """A spec of which each published version is the anchor of its rollouts."""
    refresh = {"interval_steps": 10, "values": "rollouts"}
    return {**MODEL, "algorithm": {"reference_refresh": refresh}, "trainer": {"update_interval": 10}, **sections}


def groups(objective: str, fields: Any = None, **rollout: Any) -> Any:
    """A spec whose loss compares the online samples of a prompt."""
    online = {"unit": "group", "mix": [{"source": "online", "share": 1}]}
    return {
        **MODEL,
        "algorithm": {"losses": [{"objective": objective}]},
        "replay": {**online, **(fields or {})},
        "rollout": {"samples_per_prompt": 4, **rollout},
    }


def pointers(document: Any) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        parse_job_spec(document)
    assert caught.value.code == "invalid_job_spec"
    return [violation.pointer for violation in caught.value.violations]


def test_a_model_path_is_enough() -> None:
    spec = parse_job_spec(MODEL)

    assert spec.model.path == "/models/pi0"
    assert spec.replay.online_share == 0.5


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, ["/model"]),
        ({"model": {"path": "x", "weights": "y"}}, ["/model/weights"]),
        ({**MODEL, "surprise": 1}, ["/surprise"]),
        (chat(template="none", system="be brief"), ["/model/chat/system"]),
        (chat(template="none", template_arguments={"x": 1}), ["/model/chat/template_arguments"]),
        (
            chat(template_arguments={"add_generation_prompt": False}),
            ["/model/chat/template_arguments/add_generation_prompt"],
        ),
        (chat(template_arguments={"a b": 1}), ["/model/chat/template_arguments/a b/[key]"]),
        (chat(reasoning=["<think>"]), ["/model/chat/reasoning/1"]),
        (chat(reasoning=["", "</think>"]), ["/model/chat/reasoning/0"]),
        ({"model": {"path": "x", "stop": [""]}}, ["/model/stop/0"]),
        ({"model": {"path": "x", "stop": "\n"}}, ["/model/stop"]),
        ({"model": {"path": "x", "lora": {"rank": 0}}}, ["/model/lora/rank"]),
        ({"model": {"path": "x", "lora": {"targets": ["q_proj", "lm_head"]}}}, ["/model/lora/targets/1"]),
        (refreshed() | {"model": {"path": "x", "lora": {}}}, ["/algorithm/reference_refresh"]),
        ({**MODEL, "algorithm": {"beta": 0}}, ["/algorithm/beta"]),
        ({**MODEL, "algorithm": {"beta": "hot"}}, ["/algorithm/beta"]),
        ({**MODEL, "algorithm": {"beta": float("nan")}}, ["/algorithm/beta"]),
        ({**MODEL, "tasks": {"kind": "taco"}}, ["/tasks/path"]),
        ({**MODEL, "value": None, "replay": {"mix": [{"source": "online", "share": 1}]}}, ["/value"]),
        ({**MODEL, "replay": {"mix": [{"source": "online", "share": 0.7}]}}, ["/replay/mix"]),
        ({**MODEL, "offline": {"keep_reference_samples": False}}, ["/replay/mix"]),
        ({**MODEL, "rollout": {"temperature": [0.8, 0.1]}}, ["/rollout/temperature"]),
        ({**MODEL, "evaluation": {"samples": 5}}, ["/evaluation/ks"]),
        ({**MODEL, "trainer": {"update_interval": 7}}, ["/trainer/checkpoint_interval"]),
        ({**MODEL, "algorithm": {"losses": [{"objective": "monte_carlo_squared"}]}}, ["/algorithm/losses/0/objective"]),
        ({**MODEL, "algorithm": {"critic": {}}}, ["/algorithm/critic"]),
        ({**MODEL, "trainer": {"zero_stage": 0, "offload": "optimizer"}}, ["/trainer/offload"]),
        ({**MODEL, "trainer": {"sequence_parallel": 2, "packing": False}}, ["/trainer/sequence_parallel"]),
        ({**MODEL, "trainer": {"zero_stage": 2, "offload": "optimizer_and_parameters"}}, ["/trainer/offload"]),
        (
            replay(sampler="outcome_balanced", correct_only=True, max_age_versions=1, min_value_spread=0.1)
            | {"value": None},
            ["/value", "/replay/mix/0/sampler", "/replay/mix/0", "/replay/mix/0/max_age_versions"],
        ),
        (replay({"unit": "group"}, source="online", correct_only=True), ["/replay/mix/0/correct_only"]),
        (replay({"unit": "group"}, source="online", sampler="outcome_balanced"), ["/replay/mix/0/sampler"]),
        (
            replay({"max_times_sampled": 3, "online_capacity": 63}, source="online") | {"trainer": {"batch_size": 64}},
            ["/replay/online_capacity"],
        ),
        (groups("grpo", samples_per_prompt=1), ["/rollout/samples_per_prompt"]),
        (groups("group_centred_squared", {"unit": "trajectory"}), ["/replay/unit"]),
        (groups("grpo") | {"trainer": {"micro_batch_size": 3}}, ["/trainer/micro_batch_size"]),
        (groups("grpo", {"mix": ONLINE_AND_HUMAN}), ["/algorithm/losses/0/sources"]),
        (anchored(trainer={"update_interval": 5}), ["/algorithm/reference_refresh/interval_steps"]),
        (
            anchored(rollout={"temperature": [0.5, 1], "top_p": 0.9, "samples_per_prompt": 1}),
            ["/rollout/temperature", "/rollout/top_p", "/rollout/samples_per_prompt"],
        ),
        (anchored(value=None), ["/value", "/replay/mix"]),
        (groups("grpo") | {"algorithm": {"losses": GRPO, "beta_per": "token"}}, ["/algorithm/beta_per"]),
        (refreshed(interval_steps=15), ["/algorithm/reference_refresh/interval_steps"]),
        (refreshed() | {"trainer": {"reference": "cached"}}, ["/trainer/reference"]),
        (refreshed() | {"value": None, "replay": ONLINE}, ["/value", "/value"]),
        (
            {**MODEL, "tasks": {"reward": {"scale": 2, "shift": -1}}},
            ["/tasks/reward/shift"],
        ),
        ({**MODEL, "tasks": SCORED, "value": {"pivotal": {}}}, ["/value/pivotal"]),
        ([], ["/"]),
    ],
)
def test_an_impossible_spec_is_refused_with_the_pointer_of_the_field(document: Any, expected: list[str]) -> None:
    assert pointers(document) == expected


def test_an_anchor_of_the_rollouts_needs_neither_values_nor_a_reference_in_the_trainer() -> None:
    spec = parse_job_spec(anchored(value=None, replay=ONLINE, model={"path": "x", "lora": {}}))

    assert spec.algorithm.anchors_by_rollouts
    assert not spec.algorithm.refreshes_by_samples
    assert spec.trainer.reference == "cached"


def test_annotations_are_no_use_for_scores_between_right_and_wrong() -> None:
    losses = [{"objective": "monte_carlo_squared"}]
    mix = [{"source": "online", "share": 0.5}, {"source": "annotated", "share": 0.5}]
    document = {**MODEL, "algorithm": {"losses": losses}, "value": {"pivotal": {}}, "replay": {"mix": mix}}

    assert pointers({**document, "tasks": SCORED}) == ["/tasks/verifier", "/value/pivotal"]


def test_template_arguments_keep_their_types() -> None:
    arguments = {"budget": 1, "date": None, "effort": "high", "enable_thinking": False, "share": 0.5}
    spec = parse_job_spec(chat(template_arguments=arguments))

    assert repr(spec_from_json(spec_to_json(spec)).model.chat.template_arguments) == repr(arguments)


FRESH_AND_MEMORY = [{"source": "online", "share": 0.5}, {"source": "memory", "share": 0.5}]
AGAIN = {"objective": "supervised", "sources": ["memory"]}


def remembering(*terms: Any, rollout: Any = None, offline: Any = None, **fields: Any) -> Any:
    """A spec half of whose batches are remembered answers; its terms besides one on the fresh half."""
    fresh = {"objective": "terminal_squared", "sources": ["online"]}
    return {
        **MODEL,
        "algorithm": {"losses": [fresh, *terms]},
        "replay": {"mix": FRESH_AND_MEMORY, **fields},
        "rollout": rollout or {},
        "offline": offline or {},
    }


def test_remembered_answers_may_be_learned_by_imitation_and_by_value() -> None:
    spec = parse_job_spec(remembering(AGAIN, {"objective": "terminal_squared", "sources": ["memory"]}))
    assert spec.replay.remembers
    assert spec.counts_outcomes
    assert not parse_job_spec(MODEL).counts_outcomes
    for document in (MODEL, remembering(AGAIN)):
        whole = parse_job_spec(document)
        assert parse_job_spec(whole.model_dump(mode="json")) == whole
    assert parse_job_spec({**MODEL, "rollout": {"unsolved_share": 0.5}}).counts_outcomes


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (remembering(), ["/algorithm/losses"]),
        (remembering({**AGAIN, "objective": "group_centred_squared"}), ["/algorithm/losses/1/sources"]),
        (remembering({**AGAIN, "objective": "grpo"}), ["/algorithm/losses/1/sources"] * 2),
        (remembering(AGAIN, mix=[{"source": "memory", "share": 1}]), ["/replay/mix"]),
        (
            remembering(AGAIN, mix=[FRESH_AND_MEMORY[0], {**FRESH_AND_MEMORY[1], "sampler": "pairs"}]),
            ["/replay/mix/1/sampler"],
        ),
        (
            remembering(AGAIN, unit="group", rollout={"samples_per_prompt": 3}),
            ["/trainer/batch_size", "/replay/mix/1/share"],
        ),
        (
            remembering(AGAIN, memory={"also": ["other_run", "human"]}, offline={"human_solutions": 0}),
            ["/replay/memory/also/0", "/replay/memory/also/1"],
        ),
        ({**MODEL, "replay": {"memory": {"per_prompt": 3}}}, ["/replay/memory"]),
        ({**MODEL, "rollout": {"unsolved": "lately"}}, ["/rollout/unsolved"]),
        (replay() | {"rollout": {"unsolved_share": 0.5}}, ["/rollout/unsolved_share"]),
    ],
)
def test_memory_that_could_not_be_learned_from_is_refused(document: Any, expected: list[str]) -> None:
    assert sorted(pointers(document)) == sorted(expected)


@pytest.mark.parametrize("objective", ["grpo", "group_centred_squared"])
def test_a_loss_that_compares_samples_takes_whole_groups(objective: str) -> None:
    assert parse_job_spec(groups(objective)).algorithm.needs_groups


def test_a_job_may_have_another_reward_and_a_reference_that_is_refreshed() -> None:
    reward = {"score": "share_of_tests", "tests": "public", "scale": 2, "shift": -2.5}
    spec = parse_job_spec({**refreshed(), "tasks": {"reward": reward}})
    assert spec.tasks.reward.best == -0.5


def test_steps_that_no_term_could_learn_from_are_refused() -> None:
    losses = [{"objective": "supervised", "sources": ["human"]}]
    terms = {"algorithm": {"losses": losses}}

    assert pointers({**MODEL, **terms, "replay": ONLINE}) == ["/algorithm/losses"]
    assert parse_job_spec({**MODEL, **terms, "replay": {"mix": ONLINE_AND_HUMAN}}).trainer.steps
    assert parse_job_spec({**MODEL, **terms, "replay": ONLINE, "trainer": {"steps": 0}, "value": {}}).value


def test_every_fault_is_reported_at_once() -> None:
    found = pointers({"model": {}, "algorithm": {"beta": -1}, "seed": -4})

    assert sorted(found) == ["/algorithm/beta", "/model/path", "/seed"]


def test_a_refusal_never_repeats_the_input() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_job_spec({**MODEL, "seed": "canary-secret", "labels": {"a": ["canary-secret"]}})

    assert "canary-secret" not in str(caught.value)


def test_a_spec_survives_its_canonical_json() -> None:
    spec: JobSpec = parse_job_spec({**MODEL, "labels": {"b": "2", "a": "1"}, "rollout": {"temperature": 0.7}})

    assert spec_from_json(spec_to_json(spec)) == spec
    assert spec_to_json(spec) == spec_to_json(
        parse_job_spec({"rollout": {"temperature": 0.7}, "labels": {"a": "1", "b": "2"}, **MODEL})
    )
