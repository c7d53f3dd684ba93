"""What the baseline probe makes of counts, which job it submits, and the known responses of a preview."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from spo.cli.tasks import known_responses, written_answer
from spo.client.models import PromptSuccess
from spo.errors import InvalidInput
from spo.spec.job_spec import parse_job_spec
from spo.tasks.answer import fault_of
from spo.tasks.load import histogram_lines, learnability, probe_document
from spo.tasks.problem import Problem
from spo.tasks.sources import gym_problem
from spo.v1 import verdict_pb2 as wire
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule, CodeTests


def prompt(successes: int | None, samples: int | None = 8, **fields: object) -> PromptSuccess:
    known = {"prompt_id": "p", "text": "t", "successes": successes, "samples": samples}
    if samples:
        known["lowest_reward"] = 0.0 if successes == samples else -1.0
        known["highest_reward"] = 0.0 if successes else -1.0
    return PromptSuccess.model_validate({**known, **fields})


def test_problems_are_counted_by_what_can_be_learnt_from_them() -> None:
    prompts = [prompt(0), prompt(0, with_solutions=True), prompt(8), prompt(3), prompt(7), prompt(None, None)]

    found = learnability(prompts)

    assert (found.problems, found.unsolved, found.solved, found.learnable, found.unknown) == (6, 2, 1, 2, 1)
    assert found.unsolved_with_solutions == 1
    assert found.mean_success == pytest.approx((0 + 0 + 8 + 3 + 7) / 40)
    assert found.histogram == (2, 0, 0, 1, 0, 0, 0, 0, 1, 1)
    assert [line.split()[3] for line in histogram_lines(found)] == ["2", "0", "0", "1", "0", "0", "0", "0", "1", "1"]
    assert "2 unsolved: their success rate may still be up to 31%" in found.suggestions[0]


def test_partly_right_responses_are_learnt_from_without_any_success() -> None:
    assert learnability([prompt(0, highest_reward=-0.4)]).learnable == 1


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([prompt(0)] * 3 + [prompt(1)], "most are unsolved"),
        ([prompt(8)] * 3 + [prompt(1)], "most are solved already"),
        ([prompt(8), prompt(0)], "none is learnable"),
        ([prompt(8)] * 3 + [prompt(4)], "one prompt in 4 teaches something"),
        ([prompt(None, None)], "nothing was sampled"),
        ([], "nothing was sampled"),
    ],
)
def test_what_to_do_about_it_is_said(prompts: list[PromptSuccess], told: str) -> None:
    assert any(told in suggestion for suggestion in learnability(prompts).suggestions)


def test_where_all_is_learnable_nothing_is_suggested() -> None:
    assert learnability([prompt(4)] * 5).suggestions == ()


def test_a_probe_is_a_valid_job_of_no_steps_whatever_the_job_trains_with() -> None:
    spec = {
        "name": "mine",
        "seed": 3,
        "model": {"path": "/models/pi0", "lora": {"rank": 4}},
        "tasks": {"kind": "toy", "train_problems": 50},
        "replay": {"mix": [{"source": "human", "share": 1.0}]},
        "value": {"samples": 800, "temperature": 0.7, "sequential": {}},
        "algorithm": {"losses": [{"objective": "sft", "weight": 1.0}]},
    }

    probed = parse_job_spec(probe_document(spec, 8, 20, "/models/other"))

    assert (probed.trainer.steps, probed.tasks.train_problems, probed.seed) == (0, 20, 3)
    assert probed.value is not None
    assert (probed.value.samples, probed.value.temperature, probed.value.sequential) == (8, 0.7, None)
    assert (probed.model.path, probed.model.lora, probed.offline.human_solutions) == ("/models/other", None, False)
    assert probe_document({"model": {"path": "/m"}}, 8, 1000, None)["tasks"] == {"train_problems": 1000}


def test_what_is_no_spec_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="the sections `model` and `tasks`"):
        probe_document({"tasks": "toy", "model": {}}, 8, 1000, None)


def test_a_job_of_no_steps_needs_values() -> None:
    recipe = Path(__file__).parents[3] / "deploy" / "recipes" / "toy" / "grpo.yaml"
    document = yaml.safe_load(recipe.read_text())
    document["model"]["path"] = "/m"
    parse_job_spec(document)
    document["trainer"]["steps"] = 0

    with pytest.raises(InvalidInput) as caught:
        parse_job_spec(document)

    assert [fault.pointer for fault in caught.value.violations] == ["/trainer/steps"]


@pytest.mark.parametrize("name", ["whole", "first_line", "last_number", "after_marker", "boxed", "xml_tag"])
def test_an_expected_answer_is_written_where_its_rule_looks_and_a_wrong_one_too(name: str) -> None:
    rule = AnswerRule(
        expected=["1,234"],
        comparison=AnswerComparison.ANSWER_COMPARISON_NUMERIC,
        extraction=AnswerExtraction.Value(f"ANSWER_EXTRACTION_{name.upper()}"),
        marker={"after_marker": "####", "xml_tag": "answer"}.get(name, ""),
    )

    known = known_responses(Problem("How many?", wire.TestSet(answer=rule), "text"))

    assert known.right is not None
    assert known.right == written_answer(rule, "1,234")
    assert fault_of(rule, known.right) is None
    assert known.wrong is not None
    assert "expected '1,234', found '2469.0'" in (fault_of(rule, known.wrong) or "")


def test_what_an_answer_must_match_is_no_answer() -> None:
    rule = AnswerRule(expected=["[ab]+"], comparison=AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION)
    assert known_responses(Problem("?", wire.TestSet(answer=rule), "text")).right is None


def test_programs_functions_and_generators_have_known_responses() -> None:
    program = Problem("Print 1.", wire.TestSet(tests=[wire.TestCase(stdout=b"1")]), response_format="fenced")
    assert known_responses(program).right is None
    assert "not the answer" in (known_responses(program).wrong or "")
    tests = wire.TestSet(code_tests=CodeTests(code="assert f() == 1", entry_point="f"))
    function = Problem("Write f.", tests, response_format="fenced", human_solutions=("def f(): return 1",))
    assert known_responses(function).right == "```python\ndef f(): return 1\n```"
    assert "def f(*_, **__)" in (known_responses(function).wrong or "")
    gym = gym_problem("gcd", {"question": "gcd of 4 and 6?", "answer": "2", "metadata": {}})
    assert (known_responses(gym).right, known_responses(gym).wrong) == ("<answer>2</answer>", "<answer>not it</answer>")
