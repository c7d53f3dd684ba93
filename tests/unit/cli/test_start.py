"""`spo init` and `spo convert` write files that can be submitted, and say what they do not carry over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from spo.cli import start as cli_start
from spo.cli.app import app
from spo.cli.start import MachineFacts, convert_config, convert_rows
from spo.errors import InvalidInput
from spo.spec.job_spec import parse_job_spec
from spo.tasks.records import read_jsonl
from spo.testing.runs import write_model_without_weights

LAYERS = {"num_hidden_layers": 2, "intermediate_size": 128, "num_key_value_heads": 2}
LARGE = {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64}
SUM = {"statement": "Say 4.", "answer": {"expected": ["4"]}, "human_solutions": ["4"]}
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
}


def run(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model_without_weights(tmp_path / "pi0", **LAYERS)
    return tmp_path / "pi0"


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    rows = [SUM | {"statement": f"Say 4 after {number}."} for number in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "sums.jsonl"


def test_a_job_is_written_that_fits_model_problems_and_machine(model: Path, problems: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    assert run("init", model, problems, "--out", job).exit_code == 0
    text = job.read_text()
    spec = parse_job_spec(yaml.safe_load(text))

    assert spec.model.path == str(model)
    assert spec.tasks.path == str(problems)
    assert spec.tasks.evaluation_problems == 4
    assert spec.model.dtype == "float32"
    assert [source.source for source in spec.replay.mix] == ["online", "reference", "human"]
    assert "40 problems have some" in text
    assert all("#" in line for line in text.splitlines() if "learning_rate" in line)
    assert isinstance(run("init", model, problems, "--out", job).exception, InvalidInput)
    assert job.read_text() == text


def test_what_does_not_fit_is_made_to_fit_and_said(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model_without_weights(tmp_path / "large", **LARGE)
    small = MachineFacts(1, 80 * 10**9, accelerated=True, words="one GPU of 80 GB")
    monkeypatch.setattr(cli_start, "look_at_machine", lambda: small)
    assert run("init", tmp_path / "large", problems, "--out", tmp_path / "job.yaml").exit_code == 0

    assert "no setting makes it fit here" in (tmp_path / "job.yaml").read_text()


def test_a_model_without_sizes_and_a_file_without_problems_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert isinstance(run("init", model, tmp_path / "empty.jsonl", "--out", tmp_path / "a").exception, InvalidInput)
    (model / "config.json").write_text("{}")
    assert isinstance(run("init", model, tmp_path / "empty.jsonl", "--out", tmp_path / "a").exception, InvalidInput)
    assert not (tmp_path / "a").exists()


def test_rows_of_verl_keep_the_rules_of_their_source(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([VERL_ROW] * 2 + [VERL_ROW | {"data_source": "mine"}]), tmp_path / "t.parquet")
    done = run("convert", "rows", tmp_path / "t.parquet", tmp_path / "t.jsonl")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]

    assert rows[0]["statement"] == "2 + 2?"
    assert rows[0]["answer"] == {
        "expected": ["4"],
        "extraction": "after_marker",
        "marker": "####",
        "comparison": "numeric",
    }
    assert rows[2]["answer"]["comparison"] == "math"
    assert "Be short." in done.output
    assert len(list(read_jsonl(str(tmp_path / "t.jsonl")))) >= 1


def test_rows_of_trl_bring_answers_and_completions_and_bad_ones_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    completion = [{"role": "assistant", "content": "\\boxed{5}"}]
    file.write_text(json.dumps({"prompt": "2 + 3?", "solution": 5, "completion": completion}))
    found = convert_rows(file, {"extraction": "boxed", "comparison": "numeric"})
    assert found.rows[0]["human_solutions"] == ["\\boxed{5}"]
    assert found.rows[0]["answer"] == {"expected": ["5"], "extraction": "boxed", "comparison": "numeric"}

    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    bad: list[object] = [{"prompt": "no answer"}, {"prompt": turns, "answer": "1"}, {"answer": "1"}, 7]
    file.write_text("\n".join(map(json.dumps, bad)))
    with pytest.raises(InvalidInput) as refused:
        convert_rows(file, {})
    assert len(refused.value.violations) == len(bad)
    assert "line 1" in refused.value.violations[0].pointer


def test_a_configuration_of_verl_becomes_a_job(tmp_path: Path) -> None:
    theirs = {
        "actor_rollout_ref": {
            "model": {"path": "/models/q", "lora_rank": 0, "lora_alpha": 16, "enable_gradient_checkpointing": True},
            "actor": {"ppo_mini_batch_size": 64, "optim": {"lr": 3e-6, "lr_warmup_steps": -1}, "kl_loss_coef": 0.001},
            "rollout": {"n": 5, "temperature": 0.8, "prompt_length": "${oc.select:data.max_prompt_length,512}"},
        },
        "data": {"train_files": ["/d/train.parquet"], "max_prompt_length": 512, "max_response_length": 2048},
        "trainer": {"total_training_steps": None, "save_freq": -1, "test_freq": 5, "experiment_name": "gsm8k"},
    }
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(theirs))
    done = run(
        "convert", "config", "verl", tmp_path / "verl.yaml", tmp_path / "job.yaml", "--tasks", tmp_path / "t.jsonl"
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "job.yaml").read_text()
    spec = parse_job_spec(yaml.safe_load(text))

    assert (spec.name, spec.model.path, spec.tasks.path) == ("gsm8k", "/models/q", str(tmp_path / "t.jsonl"))
    assert (spec.model.max_response_tokens, spec.rollout.samples_per_prompt) == (2048, 5)
    assert spec.trainer.batch_size == 64 * 5
    assert spec.trainer.learning_rate == 3e-6
    assert spec.evaluation.interval_steps == 5
    assert spec.model.lora is None
    assert "not carried over: actor_rollout_ref.actor.kl_loss_coef: 0.001 (algorithm.beta is" in text


def test_a_configuration_of_trl_becomes_a_job() -> None:
    theirs = {
        "model_name_or_path": "/models/q",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 256,
        "lora_r": 16,
        "beta": 0.04,
        "loss_type": "dapo\n# a trick",
    }
    found = convert_config("trl", theirs)
    spec = parse_job_spec(yaml.safe_load(found.text))

    assert spec.trainer.batch_size == 32
    assert spec.model.lora is not None
    assert spec.model.lora.rank == 16
    assert set(found.left) == {"beta", "loss_type"}
    with pytest.raises(InvalidInput) as refused:
        convert_config("trl", {"learning_rate": "fast"})
    assert refused.value.violations
