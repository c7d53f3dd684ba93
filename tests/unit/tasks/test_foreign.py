"""Files of other projects: what each is taken as, that a right response can be right, and what is refused by row."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from spo.cli.tasks import previews
from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks import load
from spo.tasks.answer import fault_of
from spo.tasks.foreign import SHAPES, read_foreign, shape_of, spec_lines
from spo.tasks.foreign_answers import VERL_RULES, Wish, same_words
from spo.tasks.records import Record, jsonl_problem
from spo.tasks.sources import read_gsm8k
from spo.v1.verdict_pb2 import AnswerComparison

SHIPPED = Path(load.__file__).parent / "data"
SUMS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def verl(source: str, question: str, truth: object, **more: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": question}]
    return {"data_source": source, "prompt": asked, "reward_model": {"style": "rule", "ground_truth": truth}, **more}


def written(folder: Path, *rows: object, name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


GSM8K = {"question": "How much?", "answer": "12/60 = $<<12/60=0.2>>0.2.\nSo 50.\n#### 1,050"}
# A row, a right response and a wrong one.
ANSWERED: dict[str, tuple[dict[str, Any], str, str]] = {
    "raw GSM8K": (GSM8K, "#### 1050", "\\boxed{1050} #### 7"),
    "question and answer": ({"question": "What is 2 + 2?", "answer": "4"}, "\\boxed{4}", "4"),
    "an answer that is a number": ({"prompt": "2 + 2?", "answer": 4}, "\\boxed{4}", "\\boxed{5}"),
    "several right answers": ({"prompt": "A root of x^2 = 4?", "answer": ["2", "-2"]}, "\\boxed{-2}", "\\boxed{3}"),
    "MATH": (
        {"problem": "1 + 1?", "solution": "It is $\\boxed{2}$.", "level": "Level 1"},
        "\\boxed{2}",
        "\\boxed{3}",
    ),
    "a question about a boxed set": (
        {"question": "A boxed set has 4 bricks. How many has it?", "answer": "4"},
        "\\boxed{4}",
        "a boxed 4",
    ),
    "a prompt that asks for hashes": (
        {"prompt": 'Answer after "####". 2 + 2?', "answer": "4"},
        "so\n#### 4",
        "\\boxed{4}",
    ),
    "a prompt that asks for a tag": (
        {"prompt": "Write <answer>N</answer>. 2 + 2?", "answer": "4"},
        "<answer>4</answer>",
        "4",
    ),
    "a prompt that asks for a line": ({"prompt": "End with Answer: N. 2 + 2?", "answer": "4"}, "Answer: 4", "4"),
    "an answer in words": ({"question": "Capital of France?", "answer": "Paris"}, "\\boxed{paris}", "\\boxed{Rome}"),
    "ARC": (
        {
            "question": "Which is wet?",
            "choices": {"text": ["fire", "water"], "label": ["A", "B"]},
            "answerKey": "B",
        },
        "\\boxed{B}",
        "\\boxed{A}",
    ),
    "MMLU": ({"question": "Which is wet?", "choices": ["fire", "water"], "answer": 1}, "\\boxed{B}", "\\boxed{A}"),
    "NuminaMath 1.5, choices": (
        {"problem": "A) 1 B) 2?", "solution": "", "answer": "B", "question_type": "MCQ"},
        "\\boxed{(B)}",
        "\\boxed{A}",
    ),
    "verl, GSM8K": (verl("openai/gsm8k", "2 + 2?", "4"), "#### 4", "\\boxed{4}"),
    "verl, GSM8K, whole solution": (verl("openai/gsm8k", "2 + 2?", "2 + 2 = 4\n#### 4"), "#### 4", "#### 5"),
    "verl, MATH-500": (verl("HuggingFaceH4/MATH-500", "2 + 2?", "4"), "\\boxed{4}", "#### 4"),
    "verl, DAPO": (verl("math_dapo", "The last line: Answer: $Answer. 2 + 2?", "4"), "Answer: 4", "\\boxed{4}"),
    "verl, AIME of a year": (verl("aime_2025", "2 + 2?", "4"), "Answer: 4", "4"),
    "verl, NuminaMath": (verl("numina_amc_aime", "2 + 2?", "4"), "\\boxed{4}", "4"),
    "verl, Search-R1": (
        verl("searchR1_nq", "Who? <answer>", {"target": ["The Beatles", "Beatles"]}),
        "<answer> the beatles. </answer>",
        "<answer>Queen</answer>",
    ),
    "SYNTHETIC-2, mathematics": (
        {
            "prompt": "2 + 2?",
            "task_type": "verifiable_math",
            "verification_info": json.dumps({"ground_truth": "4"}),
        },
        "\\boxed{4}",
        "4",
    ),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_an_answer_can_be_right_and_its_prompt_asks_for_it(name: str, tmp_path: Path) -> None:
    row, right, wrong = ANSWERED[name]
    found = read_foreign(written(tmp_path, row))
    problem = jsonl_problem(Record("", found.rows[0]))
    rule = problem.tests.answer
    if rule.comparison == AnswerComparison.ANSWER_COMPARISON_MATH:
        # Numbers alone are compared here: mathematics needs a judge.
        rule.comparison = AnswerComparison.ANSWER_COMPARISON_NUMERIC

    assert found.refused == {}
    assert fault_of(rule, right) is None
    assert fault_of(rule, wrong) is not None
    for solution in problem.human_solutions:
        assert fault_of(rule, solution) is None
    wanted = {"boxed": "\\boxed", "after_marker": rule.marker, "xml_tag": f"<{rule.marker}>"}
    assert wanted[str(found.rows[0]["answer"]["extraction"])] in problem.statement  # type: ignore[index]
    assert (problem.statement != str(row.get("question", row.get("problem", row.get("prompt"))))) or not found.added


def test_the_solution_that_verls_preparation_keeps_is_a_human_one(tmp_path: Path) -> None:
    row = verl("openai/gsm8k", "How much? Answer after ####.", "1050", extra_info={"answer": GSM8K["answer"]})
    wrong = verl("openai/gsm8k", "How much? Answer after ####.", "7", extra_info={"answer": GSM8K["answer"]})
    found = read_foreign(written(tmp_path, row, wrong))

    assert found.rows[0]["human_solutions"] == ["12/60 = $0.2.\nSo 50.\n#### 1,050"]
    assert "human_solutions" not in found.rows[1], "what the rule finds wrong is no solution"


def test_every_source_that_verl_scores_by_an_answer_is_taken(tmp_path: Path) -> None:
    rows = [verl(source, "2 + 2?", "4" if "search" not in source else {"target": ["four"]}) for source in VERL_RULES]
    found = read_foreign(written(tmp_path, *rows))

    assert found.refused == {}
    assert found.taken == len(VERL_RULES) > 15


REFUSED: dict[str, tuple[object, str]] = {
    "a source that verl does not score": (
        verl("my/arith", 'Output the answer after "####".', "4"),
        "data source 'my/arith' is none that verl scores itself: say its rule, such as --extraction after_marker "
        "--marker '####' --comparison numeric",
    ),
    "a null answer": ({"problem": "What?", "answer": None, "solution": "?"}, "column answer is null"),
    "a proof": ({"problem": "Prove it.", "answer": "proof", "solution": "Trivial."}, "nothing to compare"),
    "a missing answer": ({"question": "What?", "answer": "notfound"}, "nothing to compare"),
    "an answer of marks": ({"question": "What?", "answer": "?"}, "holds nothing to compare"),
    "a whole solution without an end": ({"question": "What?", "answer": "One.\nTwo."}, "a whole text with neither"),
    "hashes with nothing after them": ({"question": "What?", "answer": "One.\n####"}, "nothing stands after"),
    "a truth value": ({"question": "Is it?", "answer": True}, "true or false"),
    "no question": ({"answer": "4"}, "no question"),
    "pictures": ({"question": "What is seen?", "answer": "4", "images": ["a.png"]}, "column images"),
    "a picture's place": ({"question": "<image> What?", "answer": "4"}, "shows <image>"),
    "a picture in a turn": (
        {
            "prompt": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "?"}]}
            ],
            "answer": "4",
        },
        "a turn holds image_url",
    ),
    "verl's pictures": (verl("hiyouga/geometry3k", "<image>How long?", "4"), "shows <image>"),
    "several turns": (
        {"prompt": [{"role": role, "content": "x"} for role in ("user", "assistant", "user")], "answer": "1"},
        "several turns",
    ),
    "no row": (7, "a row is a mapping"),
    "running text": ({"text": "Once upon a time."}, "running text"),
    "a question alone": ({"prompt": "Write a poem."}, "nothing decides about a response"),
    "the same preference twice": ({"prompt": "?", "chosen": "a", "rejected": "a"}, "are the same"),
    "an interactive problem": (
        {"description": "Guess.", "interaction_format": "Ask.", "official_tests": [{"input": "1", "output": "1"}]},
        "interactive",
    ),
    "tests in pairs of different lengths": (
        {"question": "Add.", "input_output": json.dumps({"inputs": ["1"], "outputs": []})},
        "as many outputs",
    ),
    "a task that is verified otherwise": (
        {"prompt": "Rhyme.", "task_type": "llm_judgeable", "verification_info": "{}"},
        "needs a verifier of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_cannot_be_taken_is_refused_with_what_is_missing(name: str, tmp_path: Path) -> None:
    row, told = REFUSED[name]
    found = read_foreign(written(tmp_path, GSM8K, row, row))

    (reason,) = found.refused
    assert told in reason
    assert [place.rpartition(", ")[2] for place in found.refused[reason]] == ["line 2", "line 3"]
    assert (found.read, found.taken) == (3, 1)
    assert found.reasons()[0].startswith("2 rows: ")


# A row, what is put in a fence as a right response, as a wrong one.
PROGRAMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "verl, codecontests": (verl("codecontests", "Print the sum.", json.dumps(SUMS)), ADD, "print(0)"),
    "verl, taco, function": (
        verl("taco", "Double.", {"fn_name": "twice", "inputs": [[2], [0]], "outputs": [4, 0]}),
        "def twice(x):\n    return 2 * x",
        "def twice(x):\n    return x",
    ),
    "APPS, a tuple for a list in a list": (
        {
            "question": "Reverse.",
            "input_output": json.dumps({"fn_name": "rev", "inputs": [[[1, 2]]], "outputs": [[[2, 1]]]}),
        },
        "def rev(x):\n    return tuple(x[::-1])",
        "def rev(x):\n    return x",
    ),
    "LiveCodeBench, packed tests": (
        {
            "question_content": "Add two numbers.",
            "starter_code": "class Solution:\n    def add(self, a, b):\n",
            "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
            "private_test_cases": base64.b64encode(
                zlib.compress(pickle.dumps(json.dumps([{"input": "5\n6", "output": "11", "testtype": "functional"}])))
            ).decode(),
            "metadata": json.dumps({"func_name": "add"}),
        },
        "class Solution:\n    def add(self, a, b):\n        return a + b",
        "class Solution:\n    def add(self, a, b):\n        return 3",
    ),
    "SYNTHETIC-1, calls": (
        {
            "prompt": "Write inc(x).",
            "task_type": "verifiable_code",
            "verification_info": {
                "language": "python",
                "test_cases": [{"fn_name": "inc", "input": "[1]", "output": "2", "type": "function_call"}],
            },
        },
        "def inc(x):\n    return x + 1",
        "def inc(x):\n    return x",
    ),
    "EvalPlus": (
        {
            "prompt": 'def inc(x):\n    """Add one."""\n',
            "entry_point": "inc",
            "canonical_solution": "    return x + 1\n",
            "base_input": [[1]],
            "plus_input": [[-5], [0.5]],
        },
        "def inc(x):\n    return x + 1",
        "def inc(x):\n    return abs(x) + 1",
    ),
    "MBPP": (
        {
            "text": "Write a function to double.",
            "code": "def dbl(x):\n    return 2 * x",
            "test_list": ["assert dbl(2) == 4", "assert dbl(3) == 6"],
        },
        "def dbl(x):\n    return x + x",
        "def dbl(x):\n    return 4",
    ),
    "Codeforces": (
        {
            "description": "Print the sum.",
            "input_format": "Two integers.",
            "examples": [{"input": "1 2", "output": "3"}],
            "official_tests": [{"input": "2 2", "output": "4"}],
        },
        ADD,
        "print(3)",
    ),
}


def test_programs_and_functions_are_judged_as_their_sets_mean_it(tmp_path: Path) -> None:
    problems = []
    for name, (row, right, wrong) in PROGRAMS.items():
        found = read_foreign(written(tmp_path, row, name=f"{len(problems)}.jsonl"))
        assert found.refused == {}, name
        known = {"human_solutions": [right], "wrong_solutions": [wrong]}
        problems.append(jsonl_problem(Record("", {**found.rows[0], **known})))
        if entry := problems[-1].tests.code_tests.entry_point:
            assert entry in problems[-1].statement, name
    shown = list(previews(problems, str, "embedded", tmp_path))

    judged = {
        name: (one.right.outcome if one.right else "", one.wrong.as_expected if one.wrong else None)
        for name, one in zip(PROGRAMS, shown, strict=True)
    }
    assert judged == dict.fromkeys(PROGRAMS, ("accepted", True))


def test_a_pickle_that_is_more_than_a_text_is_refused_and_not_run(tmp_path: Path) -> None:
    row = dict(PROGRAMS["LiveCodeBench, packed tests"][0])
    row["private_test_cases"] = base64.b64encode(zlib.compress(b"cos\nsystem\n(S'touch hacked'\ntR.")).decode()
    found = read_foreign(written(tmp_path, row))
    assert (found.taken, len(found.refused)) == (0, 1)
    assert not Path("hacked").exists()


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[tuple[str, str, float]]]] = {
    "preference, text": ({"prompt": "Hi?", "chosen": "Yes", "rejected": "No"}, [("Hi?", "Yes", 0), ("Hi?", "No", -1)]),
    "preference, conversational": (
        {
            "prompt": [{"role": "user", "content": "Hi?"}],
            "chosen": [{"role": "assistant", "content": "Yes"}],
            "rejected": [{"role": "assistant", "content": "No"}],
        },
        [("Hi?", "Yes", 0), ("Hi?", "No", -1)],
    ),
    "preference, implicit prompt": (
        {
            name: [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": said}]
            for name, said in (("chosen", "Yes"), ("rejected", "No"))
        },
        [("Hi?", "Yes", 0), ("Hi?", "No", -1)],
    ),
    "preference, whole dialogue in a text": (
        {"chosen": "\n\nHuman: Hi?\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi?\n\nAssistant: No"},
        [("Hi?", "Yes", 0), ("Hi?", "No", -1)],
    ),
    "unpaired preference": ({"prompt": "Hi?", "completion": "No", "label": False}, [("Hi?", "No", -1)]),
    "prompt and completion": ({"prompt": "Hi?", "completion": "Yes"}, [("Hi?", "Yes", 0)]),
    "conversational completion": (
        {"prompt": [{"role": "user", "content": "Hi?"}], "completion": [{"role": "assistant", "content": "Yes"}]},
        [("Hi?", "Yes", 0)],
    ),
    "chat": (
        {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes"}]},
        [("Hi?", "Yes", 0)],
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes"}]},
        [("Hi?", "Yes", 0)],
    ),
    "Alpaca": ({"instruction": "Translate.", "input": "ja", "output": "yes"}, [("Translate.\n\nja", "yes", 0)]),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_responses_that_are_rated_or_shown_become_experience(name: str, tmp_path: Path) -> None:
    row, wanted = CONVERSATIONS[name]
    found = read_foreign(written(tmp_path, row))

    assert found.makes == "experience"
    assert [(each["statement"], each["response_text"], each["reward"]) for each in found.rows] == wanted


def test_a_log_of_requests_is_experience_that_is_judged_when_it_is_imported(tmp_path: Path) -> None:
    response = {"choices": [{"message": {"role": "assistant", "content": "Yes"}}]}
    asked = {"messages": [{"role": "user", "content": "Hi?"}]}
    found = read_foreign(written(tmp_path, {"request": asked, "response": response}, {**asked, **response}))
    assert found.rows == [{"statement": "Hi?", "response_text": "Yes"}] * 2
    assert set(found.shapes) == {"OpenAI logs"}


def test_published_files_are_taken_whole_as_the_kind_that_reads_them_takes_them() -> None:
    file = SHIPPED / "gsm8k" / "test.jsonl.gz"
    found = read_foreign(file)
    problems = list(read_gsm8k(file))

    assert found.refused == {}
    assert [row["statement"] for row in found.rows] == [problem.statement for problem in problems]
    assert all(
        row["human_solutions"] == list(each.human_solutions) for row, each in zip(found.rows, problems, strict=True)
    )
    assert "kind: gsm8k" in spec_lines(found, Path("unused.jsonl"))
    functions = read_foreign(SHIPPED / "mbpp" / "test.jsonl.gz", most=20)
    assert (set(functions.shapes), functions.refused) == ({"HumanEval or HumanEval+"}, {})
    assert TasksSpec.model_validate({"kind": "human_eval", "path": str(SHIPPED / "mbpp" / "test.jsonl.gz")})


def test_a_rule_of_a_persons_own_decides_where_rows_do_not(tmp_path: Path) -> None:
    wish = Wish({"extraction": "after_marker", "marker": "Result:", "comparison": "numeric"}, "right")
    (row,) = read_foreign(written(tmp_path, {"question": "2 + 2?", "answer": "x", "right": "4"}), wish).rows
    assert row["answer"] == {"expected": ["4"], **wish.rule}
    assert "Result:" in str(row["statement"])
    (row,) = read_foreign(written(tmp_path, verl("mine", "2 + 2?", "4")), Wish(wish.rule)).rows
    assert row["answer"] == {"expected": ["4"], **wish.rule}


def test_one_system_prompt_is_named_and_several_stand_before_their_questions(tmp_path: Path) -> None:
    def row(system: str) -> dict[str, Any]:
        turns = [{"role": "system", "content": system}, {"role": "user", "content": "2 + 2?"}]
        return {"prompt": turns, "answer": "4"}

    one = read_foreign(written(tmp_path, row("Be short."), row("Be short.")))
    assert 'system: "Be short."' in spec_lines(one, tmp_path / "p.jsonl")
    assert not str(one.rows[0]["statement"]).startswith("Be short.")
    several = read_foreign(written(tmp_path, row("Be short."), row("Be long.")))
    assert "system:" not in spec_lines(several, tmp_path / "p.jsonl")
    assert [str(each["statement"]).partition("\n")[0] for each in several.rows] == ["Be short.", "Be long."]


def test_a_list_in_one_json_document_is_read_like_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for document in ([GSM8K, GSM8K], {"data": [GSM8K, GSM8K]}):
        file.write_text(json.dumps(document))
        assert read_foreign(file).taken == 2
    file.write_text("{")
    with pytest.raises(InvalidInput):
        read_foreign(file)


def test_words_are_the_same_in_any_case_with_an_article_and_marks() -> None:
    import re

    right = ("The Beatles", "the beatles", " Beatles. ", '"Beatles"')
    assert [text for text in right if not re.fullmatch(same_words("the Beatles"), text)] == []
    assert re.fullmatch(same_words("the Beatles"), "the Beatles and Queen") is None


def test_names_of_shapes_are_different_and_own_files_are_known() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert shape_of({"statement": "x", "answer": {"expected": ["1"]}}).kind == "jsonl"
    assert shape_of({"statement": "x", "response_text": "y"}).name == "experience of this platform"
