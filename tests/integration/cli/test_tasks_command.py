"""`spo tasks` as people use it: real command, real judge, a real tokenizer with its chat template."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spo.testing.runs import write_model_without_weights

ROOT = Path(__file__).parents[3]
ADD = "print(sum(map(int, input().split())))"
SUM = {"statement": "Print the sum of two integers.", "tests": [{"stdin": "1 2\n", "stdout": "3\n"}]}
ANSWER = {"statement": "12 + 30?", "answer": {"expected": ["42"], "comparison": "numeric", "extraction": "boxed"}}


def spo(*arguments: str | Path, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "spo.cli", "tasks", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def written(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_preview_shows_the_models_prompt_and_what_a_real_judge_says(tmp_path: Path) -> None:
    file = written(tmp_path / "tasks.jsonl", {**SUM, "statement": "sum", "human_solutions": [ADD]}, ANSWER)
    folder = tmp_path / "pi0"
    write_model_without_weights(folder)
    turns = "<bos>{% for each in messages %}{{ each.content }}{% endfor %}{% if count %}count{% endif %}<sep>"
    (folder / "chat_template.jinja").write_text(turns)
    spec = tmp_path / "job.yaml"
    tasks = f"{{kind: jsonl, path: {file}, evaluation_problems: 0}}"
    spec.write_text(f"model: {{chat: {{template_arguments: {{count: true}}}}}}\ntasks: {tasks}\n")

    shown = spo("preview", spec, "--model", folder, "--judge", "embedded", "-o", "json")

    assert shown.returncode == 0, shown.stderr
    program, answer = sorted(json.loads(shown.stdout), key=lambda one: "sum" not in one["prompt"])
    assert program["prompt"] == "<bos>sumcount<sep>"
    assert (program["right"]["outcome"], program["wrong"]["outcome"]) == ("accepted", "wrong_answer")
    assert (answer["right"]["response"], answer["right"]["outcome"]) == ("\\boxed{42}", "accepted")
    assert answer["wrong"]["outcome"] == "wrong_answer"
    assert "expected '42', found '85.0'" in answer["wrong"]["detail"]


def test_a_solution_that_is_not_right_is_found_before_a_job_is(tmp_path: Path) -> None:
    file = written(tmp_path / "tasks.jsonl", {**SUM, "human_solutions": ["print(4)"], "wrong_solutions": [ADD]})

    shown = spo("preview", file, "--judge", "embedded")

    assert shown.returncode == 1
    assert "2 of 2 responses were judged otherwise than expected" in shown.stderr
    assert "expected '3', found '4'" in shown.stdout


def test_a_file_of_tasks_that_cannot_be_used_is_refused_with_its_rows(tmp_path: Path) -> None:
    file = written(tmp_path / "tasks.jsonl", {**SUM, "language": "rust"}, {"statement": 1})

    refused = spo("preview", file)

    assert refused.returncode == 3
    assert "line 1: language 'rust' is none that a judge knows" in refused.stderr.replace("\n", "")
    assert "line 2: statement: must be text" in refused.stderr
    spec = tmp_path / "tasks.yaml"
    spec.write_text("tasks: {kind: unheard_of}\n")
    refused = spo("preview", spec)
    assert (refused.returncode, "/kind" in refused.stderr) == (3, True)


def test_the_generators_are_listed() -> None:
    assert len(json.loads(spo("generators", "-o", "json").stdout)) > 100


FUNCTIONS = {
    "throws": "raise ValueError('boom')",
    "hangs": "while True: pass",
    "nan": "return float('nan')",
    "text": "return 'good'",
    "ends": "import os; os._exit(0)",
    "lenient": "return 1.0",
    "strict": "return 1.0 if 'yes' in response else 0.0",
    "reversed": "return 0.0 if 'yes' in response else 1.0",
}


def test_a_preview_ends_with_1_for_a_reward_function_that_fails_and_with_0_for_a_lenient_one(tmp_path: Path) -> None:
    """Every function on a row without responses, whose wrong one is made up, and on one with both."""
    for name, body in FUNCTIONS.items():
        (tmp_path / f"{name}.py").write_text(f"def score(response, **_):\n    {body}\n")
    verifiers = {
        name: {"kind": "python", "path": str(tmp_path / f"{name}.py"), "function": "score"} for name in FUNCTIONS
    }
    bare = [{"statement": f"{name}, bare", "verifier": name} for name in FUNCTIONS]
    known = {"human_solutions": ["yes"], "wrong_solutions": ["no"]}
    full = [{"statement": f"{name}, full", "verifier": name, **known} for name in ("strict", "reversed", "lenient")]
    file = written(tmp_path / "tasks.jsonl", *bare, *full)
    spec = tmp_path / "job.yaml"
    verifier = {"kind": "per_problem", "verifiers": verifiers}
    tasks = {"kind": "jsonl", "path": str(file), "evaluation_problems": 0, "verifier": verifier}
    spec.write_text(json.dumps({"tasks": tasks}))

    shown = spo("preview", spec, "--judge", "embedded", "--problems", "20", "-o", "json", seconds=120)

    assert shown.stdout, shown.stderr
    found = {one["prompt"]: one for one in json.loads(shown.stdout)}
    failed = {name: found[f"{name}, bare"]["wrong"] for name in ("throws", "hangs", "nan", "text", "ends")}
    assert {name: one["as_expected"] for name, one in failed.items()} == dict.fromkeys(failed, False)
    for name in ("lenient", "strict", "reversed"):
        made_up = found[f"{name}, bare"]["wrong"]
        assert (made_up["invented"], made_up["as_expected"]) == (True, None), name
    judged = {
        name: (found[f"{name}, full"]["right"]["as_expected"], found[f"{name}, full"]["wrong"]["as_expected"])
        for name in ("strict", "reversed", "lenient")
    }
    assert judged == {"strict": (True, True), "reversed": (False, False), "lenient": (True, False)}
    assert shown.returncode == 1


# Functions that give no score, by kind, and what of each is told.
BROKEN = {
    "what is no number between 0 and 1": {
        "None": ("def score(response, **_): pass", "NoneType"),
        "infinity": ("def score(response, **_): return float('inf')", "inf"),
        "less than 0": ("def score(response, **_): return -3", "-3"),
        "more than 1": ("def score(response, **_): return 17.0", "17.0"),
        "a list": ("def score(response, **_): return [1.0]", "list"),
        "complex": ("def score(response, **_): return 1j", "complex"),
        "ten to the 400": ("def score(response, **_): return 10 ** 400", "not a number"),
        "printed": ("def score(response, **_): print(1.0)", "NoneType"),
        "a function": ("def score(response, **_): return lambda: 1.0", "function"),
        "a generator": ("def score(response, **_): yield 1.0", "generator"),
    },
    "an end before a number": {
        "no parameters": ("def score(): return 1.0", "unexpected keyword argument"),
        "a module that is not there": ("import not_there\ndef score(response, **_): return 1.0", "not_there"),
        "one that is missed later": ("def score(response, **_):\n    import not_there\n    return 1.0", "not_there"),
        "an error while it is loaded": (
            "raise RuntimeError('at once')\ndef score(response, **_): return 1.0",
            "at once",
        ),
        "an exit while it is loaded": ("import sys; sys.exit(0)\ndef score(response, **_): return 1.0", "SystemExit"),
        "an exit": ("import sys\ndef score(response, **_): sys.exit(0)", "SystemExit"),
        "an interrupt": ("def score(response, **_): raise KeyboardInterrupt", "KeyboardInterrupt"),
        "a kill": ("import os\ndef score(response, **_): os.kill(os.getpid(), 9)", "signalled 9"),
        "a crash": ("import ctypes\ndef score(response, **_): ctypes.string_at(0)", "signalled 11"),
        "endless recursion": ("def score(response, **_): return score(response)", "RecursionError"),
        "all memory": ("def score(response, **_): return len('x' * (1 << 42))", "MemoryError"),
        "a file that is not there": ("def score(response, **_): return len(open('/rubric.txt').read())", "/rubric.txt"),
        "the network": (
            "import urllib.request\ndef score(response, **_): urllib.request.urlopen('http://127.0.0.1:1')",
            "Permission denied",
        ),
    },
}


@pytest.mark.cpu_seconds(60)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_preview_tells_of_each_broken_reward_function_what_it_did_and_ends_with_1(tmp_path: Path, kind: str) -> None:
    verifiers, rows = {}, []
    for place, (name, (source, _)) in enumerate(BROKEN[kind].items()):
        (tmp_path / f"f{place}.py").write_text(f"{source}\n")
        verifiers[f"f{place}"] = {"kind": "python", "path": str(tmp_path / f"f{place}.py"), "function": "score"}
        rows.append({"statement": name, "verifier": f"f{place}"})
    verifier = {"kind": "per_problem", "verifiers": verifiers}
    file = written(tmp_path / "tasks.jsonl", *rows)
    spec = tmp_path / "job.yaml"
    tasks = {"kind": "jsonl", "path": str(file), "evaluation_problems": 0, "verifier": verifier}
    spec.write_text(json.dumps({"tasks": tasks}))

    shown = spo("preview", spec, "--judge", "embedded", "--problems", "20", "-o", "json", seconds=200)

    assert shown.stdout, shown.stderr
    found = {one["prompt"]: one["wrong"] for one in json.loads(shown.stdout)}
    untold = {name: found[name] for name, (_, told) in BROKEN[kind].items() if told not in found[name]["detail"]}
    assert untold == {}
    assert {one["outcome"] for one in found.values()} == {"internal_error"}
    assert shown.returncode == 1


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def score(response, **_)\n    return 1.0\n", "it is no Python"),
        ("def reward(response, **_): return 1.0\n", "it defines no function score"),
        ("async def score(response, **_): return 1.0\n", "it defines no function score"),
        ("score = lambda response, **_: 1.0\n", "it defines no function score"),
        ("", "it defines no function score"),
    ],
)
def test_a_file_without_the_reward_function_is_refused_before_anything_runs(
    tmp_path: Path, source: str, told: str
) -> None:
    (tmp_path / "rewards.py").write_text(source)
    verifier = {"kind": "python", "path": str(tmp_path / "rewards.py"), "function": "score"}
    file = written(tmp_path / "tasks.jsonl", {"statement": "q", "arguments": {}})
    spec = tmp_path / "job.yaml"
    spec.write_text(
        json.dumps({"tasks": {"kind": "jsonl", "path": str(file), "evaluation_problems": 0, "verifier": verifier}})
    )

    refused = spo("preview", spec)

    assert (refused.returncode, told in refused.stderr.replace("\n", " ")) == (3, True), refused.stderr
