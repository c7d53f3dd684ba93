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
from spo.cli.jobs import unread_problems
from spo.cli.start import MachineFacts, convert_config, convert_rows
from spo.cli.tasks import chosen_problems, tasks_and_model
from spo.console import grouped
from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec, parse_job_spec
from spo.spec.section import read_spec
from spo.tasks.load import load_tasks
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
    assert [source.source for source in spec.replay.mix] == ["online", "memory"]
    assert spec.replay.memory.also == ("human",)
    assert spec.rollout.unsolved_share > 0
    assert "40 problems have some" in text
    assert all("#" in line for line in text.splitlines() if "learning_rate" in line)
    assert isinstance(run("init", model, problems, "--out", job).exception, InvalidInput)
    assert job.read_text() == text


def test_what_a_tasks_section_says_stays_as_it_is(model: Path, problems: Path, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def score(response, **_):\n    return 1.0\n")
    verifier = {"kind": "python", "path": str(tmp_path / "score.py"), "function": "score"}
    given = {"kind": "jsonl", "path": str(problems), "evaluation_problems": 7, "verifier": verifier, "seed": 3}
    section, job = tmp_path / "tasks.yaml", tmp_path / "job.yaml"
    section.write_text(yaml.safe_dump({"tasks": given}))

    assert run("init", model, section, "--out", job).exit_code == 0

    assert yaml.safe_load(job.read_text())["tasks"] == given
    assert "decided by the verifier of kind python below" in job.read_text()


@pytest.mark.parametrize("section", [{"kind": "toy", "train_problems": 30}, {"kind": "toy"}])
def test_tasks_without_a_file_are_written_as_they_are(section: dict[str, Any], model: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(section))

    done = run("init", model, tmp_path / "tasks.yaml", "--out", tmp_path / "job.yaml")

    assert done.exit_code == 0, done.exception
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["tasks"] == section


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


def test_rows_of_verl_keep_the_rules_of_their_source_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    mine = VERL_ROW | {"data_source": "mine"}
    pq.write_table(pa.Table.from_pylist([VERL_ROW] * 2 + [mine]), tmp_path / "t.parquet")
    files = (tmp_path / "t.parquet", tmp_path / "t.jsonl")
    refused = run("convert", "rows", *files)
    assert isinstance(refused.exception, InvalidInput)
    assert [each.pointer.rpartition(", ")[2] for each in refused.exception.violations] == ["row 3"]
    assert not files[1].exists()

    done = run("convert", "rows", *files, "--leave-out")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    rule = {"extraction": "after_marker", "marker": "####", "comparison": "numeric"}
    assert [row["answer"] for row in rows] == [{"expected": ["4"], **rule}] * 2
    assert rows[0]["statement"].startswith("2 + 2?\n\nThink step by step.")
    assert "Be short." in done.output
    assert "left out: 1 rows: data source 'mine'" in done.output
    assert len(list(read_jsonl(str(files[1])))) == 2

    one = run("convert", "rows", files[0], tmp_path / "own.jsonl", "--extraction", "boxed", "--comparison", "math")
    assert one.exit_code == 0, one.output
    assert json.loads((tmp_path / "own.jsonl").read_text().splitlines()[2])["answer"]["comparison"] == "math"


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


def test_preferences_become_experience_with_the_tasks_it_answers_and_the_command_is_printed(
    model: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "pairs.jsonl", tmp_path / "rated.jsonl"
    file.write_text(json.dumps({"prompt": "Hi?", "chosen": "Yes", "rejected": "No"}))
    done = run("convert", "rows", file, out)
    assert done.exit_code == 0, done.output

    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [0.0, -1.0]
    section = yaml.safe_load((tmp_path / "rated.tasks.yaml").read_text())["tasks"]
    (problem,) = load_tasks(TasksSpec.model_validate(section)).train
    assert problem.statement == "Hi?"
    job = tmp_path / "rated.tasks.yaml"
    assert done.output.splitlines()[-2:] == [
        f"next: spo experience import {out} --name pairs --tasks {job}",
        f"then: spo job submit {job} --model FOLDER --wait",
    ]
    spec = parse_job_spec(yaml.safe_load(job.read_text()) | {"model": {"path": "/models/pi0"}})
    assert (spec.algorithm.losses[0].objective, spec.offline.experience[0].run) == ("dpo", "pairs")
    look = run("data", "look", file)
    assert "objective: dpo" in look.output
    assert "spo job submit" in look.output
    refused = run("init", model, file)
    assert "imported and learned from" in str(refused.exception)


def test_a_model_that_does_not_know_the_words_is_told_of_before_a_job(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"statement": f"What is {number} plus two, please?", "answer": {"expected": ["4"]}} for number in range(40)]
    strange, known = tmp_path / "strange.jsonl", tmp_path / "known.jsonl"
    strange.write_text("\n".join(map(json.dumps, rows)))
    known.write_text("\n".join(json.dumps(row | {"statement": "sum of the even numbers"}) for row in rows))
    said = run("init", model, strange, "--out", tmp_path / "job.yaml")
    assert said.exit_code == 0, said.output
    assert "drops most of what is asked" in said.output
    assert "warning" not in run("init", model, known, "--out", tmp_path / "other.yaml").output
    # And where nobody has asked `spo init`: before the platform is, of which there is none here.
    monkeypatch.setenv("SPO_API_URL", "http://127.0.0.1:1")
    assert "warning: /model/path: this model's tokenizer makes" in run("job", "submit", tmp_path / "job.yaml").output
    assert unread_problems(read_spec(tmp_path / "other.yaml")) == ""
    (model / "tokenizer.json").write_text("{")
    assert unread_problems(read_spec(tmp_path / "job.yaml")) == ""


def test_few_rows_are_shown_where_nobody_asked_to_hold_some_out(tmp_path: Path) -> None:
    rows, section = tmp_path / "rows.jsonl", tmp_path / "tasks.yaml"
    rows.write_text(json.dumps(SUM))
    section.write_text(json.dumps({"tasks": {"kind": "jsonl", "path": str(rows)}}))
    assert len(chosen_problems(tasks_and_model(section, "jsonl", read_spec)[0], 10).train) == 1
    section.write_text(json.dumps({"tasks": {"kind": "jsonl", "path": str(rows), "evaluation_problems": 80}}))
    with pytest.raises(InvalidInput, match="too few problems"):
        chosen_problems(tasks_and_model(section, "jsonl", read_spec)[0], 10)


def test_a_job_is_written_for_rows_of_another_project_in_either_order(model: Path, tmp_path: Path) -> None:
    rows = [VERL_ROW | {"prompt": [{"role": "user", "content": f"{number} + 2?"}]} for number in range(40)]
    (tmp_path / "verl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run("init", tmp_path / "verl.jsonl", model, "--out", tmp_path / "job.yaml")
    assert done.exit_code == 0, done.output
    spec = parse_job_spec(yaml.safe_load((tmp_path / "job.yaml").read_text()))
    assert spec.tasks.path == str(tmp_path / "verl_converted.jsonl")
    assert spec.tasks.evaluation_problems == 4
    assert len(load_tasks(spec.tasks).train) == 36

    (tmp_path / "gsm.jsonl").write_text(
        "\n".join(
            json.dumps({"question": f"{number} + 1?", "answer": f"So.\n#### {number + 1}"}) for number in range(40)
        )
    )
    assert run("init", model, tmp_path / "gsm.jsonl", "--out", tmp_path / "gsm.yaml").exit_code == 0
    spec = parse_job_spec(yaml.safe_load((tmp_path / "gsm.yaml").read_text()))
    assert (spec.tasks.kind, spec.tasks.path) == ("gsm8k", str(tmp_path / "gsm.jsonl"))
    assert [source.source for source in spec.replay.mix] == ["online", "memory"], "rollouts alone, with memory"


def test_a_look_says_what_a_file_is_judges_three_rows_and_writes_the_spec(tmp_path: Path) -> None:
    rows = [{"question": f"{number} + 1?", "answer": f"So.\n#### {number + 1}"} for number in range(20)]
    (tmp_path / "gsm.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run("data", "look", tmp_path / "gsm.jsonl", "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)

    assert (found["rows"], found["taken"], found["shapes"], found["left_out"]) == (20, 20, {"GSM8K": 20}, {})
    assert [one["right"]["outcome"] for one in found["previews"]] == ["accepted"] * 3
    assert [one["right"]["invented"] for one in found["previews"]] == [False] * 3
    assert [one["wrong"]["as_expected"] for one in found["previews"]] == [True] * 3
    spec = TasksSpec.model_validate(yaml.safe_load(found["spec"])["tasks"])
    assert (spec.kind, len(load_tasks(spec).train), found["commands"]) == ("gsm8k", 18, [])

    foreign = run("tasks", "preview", tmp_path / "gsm.jsonl")
    assert "rows of GSM8K: `spo data look" in str(foreign.exception)
    (tmp_path / "poems.jsonl").write_text('{"prompt": "Write a poem."}\n' * 40)
    refused = run("data", "look", tmp_path / "poems.jsonl").exception
    assert isinstance(refused, InvalidInput)
    assert len(refused.violations) == 40
    assert [len(alike) for alike in grouped(refused.violations)] == [40]


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
