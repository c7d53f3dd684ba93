"""What a job is said to need: published sizes, sums checked by hand, recipes that fit, a page that is fresh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spo.cli.app import app
from spo.errors import InvalidInput
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.plan import (
    NAMED,
    Device,
    Plan,
    changed,
    fewest_ranks,
    fits,
    in_gigabytes,
    named_shape,
    plan_job,
    shape_of_config,
    shape_of_folder,
    trainer_memory,
    unlearned_shares,
    what_fits,
    what_is_not_cut,
)
from spo.spec.section import STORED, read_spec

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "deploy" / "recipes" / "real"
# Recipe, the sizes of its model, devices of the trainer.
REAL = (
    ("qwen2_5_0_5b", "qwen2.5-0.5b", 1),
    ("llama3_8b_lora", "llama-3-8b", 1),
    ("llama3_8b_full", "llama-3-8b", 8),
    ("llama3_70b_lora", "llama-3-70b", 8),
    ("llama3_70b_full", "llama-3-70b", 32),
)
DEVICE_BYTES = 80 * 10**9


def spec_of(**sections: Any) -> JobSpec:
    return parse_job_spec({"model": {"path": "/models/pi0"}, **sections})


def planned(name: str, shape: str, ranks: int) -> Plan:
    return plan_job(parse_job_spec(read_spec(RECIPES / f"{name}.yaml")), named_shape(shape), ranks, Device())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
    ],
)
def test_a_named_shape_has_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert named_shape(name).parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_the_sizes_come_from_a_folders_configuration(tmp_path: Path) -> None:
    config = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    config |= {"intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}

    assert shape_of_config(config) == NAMED["qwen2.5-0.5b"]
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        shape_of_folder(tmp_path)


def test_optimiser_states_of_bf16_are_twelve_bytes_a_weight_and_are_cut_over_the_ranks() -> None:
    shape = named_shape("llama-3-8b")
    one, eight = (trainer_memory(spec_of(trainer={"zero_stage": 3}), shape, ranks) for ranks in (1, 8))

    assert one.masters + one.moments == 12 * shape.parameters
    assert (eight.masters, eight.moments, eight.gradients) == (one.masters // 8, one.moments // 8, one.gradients // 8)
    assert eight.weights == one.weights // 8


def test_an_adapter_has_states_of_its_own_weights_only() -> None:
    shape = named_shape("llama-3-8b")
    spec = parse_job_spec({"model": {"path": "/models/pi0", "lora": {"rank": 16}}})
    memory = trainer_memory(spec, shape, 1)

    # 41.9 million in peft's own count for rank 16 on all linear layers of Llama-3-8B.
    assert memory.moments == 8 * 41_943_040
    assert memory.weights == 2 * shape.parameters + 2 * 41_943_040


def test_a_teacher_is_held_beside_the_model_and_cut_over_the_ranks_at_stage_3(tmp_path: Path) -> None:
    config = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    config |= {"intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    algorithm = {"losses": [{"objective": "distillation"}], "teacher": {"path": str(tmp_path)}}
    online = {"rollout": {"temperature": 1.0, "top_p": 1.0}, "replay": {"mix": [{"source": "online", "share": 1.0}]}}
    spec = spec_of(algorithm=algorithm, trainer={"zero_stage": 3}, **online)
    small, student = named_shape("qwen2.5-0.5b"), named_shape("llama-3-8b")

    assert trainer_memory(spec, student, 4).teacher == pytest.approx(2 * small.parameters / 4, abs=4)
    assert trainer_memory(spec_of(trainer={"zero_stage": 3}), student, 4).teacher == 0


def test_the_first_settings_that_fit_are_those_that_cost_least() -> None:
    shape = named_shape("llama-3-8b")

    assert what_fits(spec_of(), named_shape("qwen2.5-0.5b"), 1, DEVICE_BYTES) == {}
    found = what_fits(spec_of(), shape, 8, 40 * 10**9)
    assert found is not None
    assert found["zero_stage"] > 1
    assert fits(changed(spec_of(), found), shape, 8, 40 * 10**9)
    assert what_fits(spec_of(), shape, 1, DEVICE_BYTES) == {"offload": "optimizer"}
    assert what_fits(spec_of(), named_shape("llama-3-70b"), 1, DEVICE_BYTES) is None


@pytest.mark.parametrize(
    ("shape", "tokens", "device_gb", "fewest"),
    [
        ("qwen2.5-0.5b", 4096, 80, 1),
        ("llama-3-8b", 4096, 80, 1),
        ("llama-3-8b", 32_768, 80, 1),
        ("llama-3-70b", 8192, 80, 8),
        # From here on ranks share a trajectory.
        ("llama-3-70b", 32_768, 80, 8),
        ("llama-3-70b", 131_072, 40, 32),
        ("llama-3-70b", 131_072, 10, None),
    ],
)
def test_the_fewest_devices_are_found_or_it_is_said_that_no_number_is_enough(
    shape: str, tokens: int, device_gb: int, fewest: int | None
) -> None:
    spec = parse_job_spec({"model": {"path": "/models/pi0", "max_response_tokens": tokens}})
    found = plan_job(spec, named_shape(shape), 1, Device(memory_bytes=device_gb * 10**9))
    if fewest is None:
        assert found.fewest is None
        assert any("no number of devices" in told and "one trajectory of" in told for told in found.warnings)
        return
    assert found.fewest is not None
    ranks, changes = found.fewest
    assert ranks == fewest
    assert fits(changed(spec, changes), named_shape(shape), ranks, device_gb * 10**9)
    assert ("sequence_parallel" in changes) == (tokens > 8192 and shape == "llama-3-70b")
    half = what_fits(spec, named_shape(shape), ranks // 2, device_gb * 10**9) if ranks > 1 else None
    assert half is None or "lora" in half


def test_ranks_that_share_a_trajectory_have_a_stretch_of_it_each_and_are_as_many_as_have_heads() -> None:
    shape = named_shape("llama-3-70b")
    alone, two = (spec_of(trainer={"zero_stage": 3, "sequence_parallel": width}) for width in (1, 2))
    long = {"model": {"path": "/models/pi0", "max_response_tokens": 32_768}}
    alone, two = (parse_job_spec(spec.model_dump() | long) for spec in (alone, two))

    assert trainer_memory(alone, shape, 64).logits - trainer_memory(two, shape, 64).logits == pytest.approx(
        4 * 8192 * (32_768 + 1024) / 2
    )
    assert trainer_memory(alone, shape, 64).masters == trainer_memory(two, shape, 64).masters
    # With a critic, and without packed rows, they share none.
    padded = alone.model_copy(update={"trainer": alone.trainer.model_copy(update={"packing": False})})
    assert fewest_ranks(alone, shape, DEVICE_BYTES) is not None
    assert fewest_ranks(padded, shape, DEVICE_BYTES) is None
    assert "which share none of this job" in what_is_not_cut(padded, shape)


@pytest.mark.parametrize(
    ("shape", "widths"),
    [("qwen2.5-0.5b", [1, 2]), ("qwen2.5-1.5b", [1, 2, 4]), ("llama-3-8b", [1, 2, 4, 8]), ("smollm2-135m", [1])],
)
def test_a_replica_has_whole_heads_on_each_device(shape: str, widths: list[int]) -> None:
    assert [width for width in (1, 2, 4, 8) if named_shape(shape).can_be_cut(width)] == widths


@pytest.mark.parametrize(("name", "shape", "ranks"), REAL)
def test_a_recipe_fits_the_devices_that_it_names(name: str, shape: str, ranks: int) -> None:
    found = planned(name, shape, ranks)

    assert found.changes == {}
    assert found.inference.fits
    # Value-estimation cuts no model over devices, so the largest says that it does not fit there.
    assert len(found.warnings) == (1 if shape == "llama-3-70b" else 0)
    assert f"--model-shape {shape} --gpus {ranks} " in (RECIPES / f"{name}.yaml").read_text()


def test_the_table_of_the_page_is_what_the_plan_says() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    for name, shape, ranks in REAL:
        found = planned(name, shape, ranks)
        states = found.trainer.masters + found.trainer.moments
        cells = [f"`real/{name}`", str(ranks), *map(in_gigabytes, (found.trainer.weights, states, found.trainer.peak))]
        replica = f"{found.inference.tensor_parallel} x {in_gigabytes(found.inference.weights)}"
        cells += [replica, *map(in_gigabytes, (found.value_bytes, found.push_bytes, found.checkpoint_bytes))]
        assert "| " + " | ".join(cells) + " |" in page


def test_the_step_of_a_wide_model_takes_what_was_measured() -> None:
    """4.466 GB above the process: hidden 896, 151,936 words, 2 layers, bf16, stage 1, 1,024 tokens, no recomputation.

    The one point there is: it holds the sum of the optimiser's step, not that of the backward pass.
    """
    shape = NAMED["qwen2.5-0.5b"]
    shallow = type(shape)(**{**vars(shape), "layers": 2})
    spec = spec_of(trainer={"micro_batch_size": 1, "activation_checkpointing": False, "zero_stage": 1})
    short = spec.model_copy(update={"model": spec.model.model_copy(update={"max_prompt_tokens": 512})})
    short = short.model_copy(update={"model": short.model.model_copy(update={"max_response_tokens": 512})})

    assert trainer_memory(short, shallow, 1).peak == pytest.approx(4.466e9, rel=0.15)


def test_the_command_says_what_is_needed_and_fails_with_what_would_help() -> None:
    recipe = str(RECIPES / "llama3_8b_full.yaml")
    good = CliRunner().invoke(app, ["plan", recipe, "--model-shape", "llama-3-8b"])
    bad = CliRunner().invoke(app, ["plan", recipe, "--model-shape", "llama-3-8b", "--gpus", "1"])

    assert good.exit_code == 0, good.output
    assert "moments" in good.output
    assert bad.exit_code == 3
    assert "trainer.offload: optimizer" in bad.output


def test_the_command_warns_of_a_share_that_no_term_learns_from_and_succeeds(tmp_path: Path) -> None:
    document = read_spec(RECIPES / "llama3_8b_full.yaml")
    document["replay"]["mix"] = [{"source": "online", "share": 0.75}, {"source": "reference", "share": 0.25}]
    document["algorithm"]["losses"] = [{"objective": "terminal_squared", "sources": ["online"]}]
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(document))

    found = CliRunner().invoke(app, ["plan", str(recipe), "--model-shape", "llama-3-8b"])

    assert found.exit_code == 0, found.output
    assert "warning: /replay/mix/1/source: no term of algorithm.losses learns from reference" in found.output


@pytest.mark.parametrize(
    ("objective", "sources", "unlearned"),
    [
        ("terminal_squared", None, []),
        ("terminal_squared", ["online", "annotated"], []),
        ("terminal_squared", ["annotated"], ["/replay/mix/0/source"]),
        # Annotations are all that it reads.
        ("monte_carlo_squared", None, ["/replay/mix/0/source"]),
    ],
)
def test_a_share_is_learnt_from_where_a_term_reads_it(
    objective: str, sources: list[str] | None, unlearned: list[str]
) -> None:
    mix = [{"source": "online", "share": 0.5}, {"source": "annotated", "share": 0.5}]
    losses = [{"objective": objective, "sources": sources}]
    document = {**read_spec(RECIPES / "llama3_8b_full.yaml"), "replay": {"mix": mix}, "algorithm": {"losses": losses}}
    spec = JobSpec.model_validate(document, context=STORED)

    assert [each.pointer for each in unlearned_shares(spec)] == unlearned
