"""What mathematics is read in an answer: forms of one result are right, answers that name several are not paid."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.sandbox_judge.jail.scores_child import Refused, _mathematics
from spo.errors import InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks import mathematics
from spo.tasks.load import check_file, load_tasks

# An expected answer as MATH writes it, and answers that say the same.
SAME: dict[str, list[str]] = {
    r"\$36": ["36", r"\$36", "$36", r"\$ 36", r"\$36.00", r"36\$", r"\text{\$}36", r"36 \text{ dollars}", "$36$"],
    r"\$32,\!348": ["32348", "32,348", r"32{,}348", r"\$32,348", r"32\,348", "32 348"],
    r"\$18.90": ["18.9", r"\$18.90", "18.90", r"\frac{189}{10}"],
    "-5": [r"-\$5", r"\$-5", "-$5", "\u22125", "-5.0", r"\text{-5}"],
    "36": [r"\(36\)", r"\[36\]", "$$36$$", r"\boxed{36}", "x=36", r"36^\circ", r"36\text{ cm}^2", "6^2", "**36**"],
    r"\frac{3}{4}": [r"\dfrac{3}{4}", r"\tfrac34", "0.75", "3/4", r"75\%", r"\frac34"],
    r"12\text{ and }13": [r"12 \text{ and } 13", "12, 13", "$12$ and $13$"],
    r"\text{Evelyn}": [r"\text{Evelyn}"],
    r"x \in [-2,7]": ["[-2,7]", r"x\in[-2,7]"],
    r"(3,\frac{\pi}{2})": [r"\left( 3, \frac{\pi}{2} \right)"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"],
    r"(-\infty,3)\cup(5,\infty)": [r"(-\infty, 3) \cup (5, \infty)"],
    r"11,\! 111,\! 111,\! 100": ["11111111100"],
    r"x=1 \\ y=2": [r"x=1 \\ y=2"],
    r"\frac{1}{2}": [
        *(r"\frac{1}{2} = 0.5", "0.5 = 1/2", "1/2=2/4", r"\frac12\approx 0.5", r"\frac{1}{2} = 0.5 = 50\%"),
        *(r"\\frac{1}{2}", r"\\boxed{\\frac{1}{2}}"),
    ],
    "2": [
        *("x = 2", "2 = 2", "x=y=2", "1+1=2", r"\frac{4}{2} = 2", r"\sqrt{4}=2", "2=1+1", r"x\approx 2", r"\approx 2"),
        *(
            r"2x=4 \Rightarrow x=2",
            r"2x = 4 \implies x = 2",
            r"2x=4 \to 2",
            "2 \u2248 2.0",
            "f(1)=2",
            "P(X=1)=2",
            "|x|=2",
        ),
        *(r"\int_0^2 x dx = 2", r"2\text{ apples}", "x:=2", r"x\to 2", r"\lim_{x\to 1} 2x = 2", "x_1 = 2", "3 - 1 = 2"),
        *(r"\binom{2}{1} = 2", "(1+1) = 2", "2.00 = 2", r"2 = 2\text{ apples}", r"10_2 = 2", "[2]", r"2^{1} = 2"),
        *(r"2\text{ hours} = 120\text{ minutes}", r"2 = 2.0 \approx 2"),
    ],
    r"\sqrt{2}": [r"\sqrt{2}\approx 1.414", r"x=\sqrt2\approx1.41421", r"x = \sqrt{2} \approx 1.41"],
    r"\frac{7}{3}": [r"\frac{7}{3} \approx 2", r"x = \frac{7}{3} \approx 2.33"],
    "12345": [r"12345 \approx 12300", r"12,345"],
    "1000": ["1000 = 10^3", r"10^3 = 1000"],
    r"2 \pmod 5": [r"x \equiv 2 \pmod{5}", r"7\pmod 5", r"2\mod 5", r"-3 \text{ (mod }5\text{)}", "2", "2 (mod 5)"],
    "5": [r"5 \pmod{7}", r"x\equiv5\pmod7", r"5 \bmod 7", r"5 \ (\text{mod } 7)", r"5 \pmod 7."],
    r"x \equiv 2, 3 \pmod 5": [r"3, 2 \pmod 5", r"x \equiv 7 \text{ or } 8 \pmod 5"],
    "[0,1)": [r"0 \le x < 1", r"x\in[0,1)", r"0\leq t<1", "0 \u2264 x < 1"],
    r"3 \le x \le 4": ["[3,4]"],
    r"\emptyset": [r"\varnothing", r"\{\}", "\u2205"],
    "3+4i": ["3 + 4 i", r"3+4\mathrm{i}", "4i+3", "3 + 4i."],
    r"\sqrt{3}": [r"\sqrt{3}.", r"3^{1/2}", r"\sqrt3,", r"\frac{3}{\sqrt{3}}"],
    "2, 3": ["3, 2", r"2 \text{ or } 3", "$2$ and $3$", r"x=2 \text{ or } x=3"],
}
# Two results, of which 2 would be right.
HEDGES = [
    *("1 or 2", "2 or 1", "1, 2", "2, 1", "1 and 2", "x=1 or x=2", "x=1, x=2", r"1 \text{ or } 2", r"2 \text{ or } 1"),
    *(r"\{1,2\}", "(1,2)", "[1,2]", r"\pm 2", "-2, 2", r"2\text{ and }3", "$1$ or $2$", "$2$ or $1$", "$2$, $3$"),
    *("2;3", "3;2", "2/3", r"2\ 3", "2 3", r"2 \vee 3", r"2 \lor 3", r"2\quad 3", r"2\\3", r"3\\2", "2 | 3", "2 vs 3"),
    *(r"\$1 or \$2", r"\$1,\$2", "$1 or $2", "$2 or $1", r"2 \text{ if } x>0, 3 \text{ otherwise}", "2 (or 3)"),
    *(r"\begin{cases}2\\3\end{cases}", r"1 \leq x \leq 2", "1<x<2", r"1\text{ to }2", "1-2", r"x\in\{1,2\}", "1\n2"),
    *(r"\text{either 1 or 2}", r"\text{2 or 3}", r"2\text{, }3", r"2 \text{ maybe } 3", "1?2", "2?3", r"\[1\]\[2\]"),
    *(r"1 \cup 2", r"2 \cup 3", r"1 \cap 2", r"1\ \cup\ 2", "1=2", "3 = 2", "1==2", "x = 1 = 2", "1=2=2", "1+2=2"),
    *(r"2\approx 3", r"2 \approx 2.9", r"3\approx 2", "2\u22483", r"1\sim 2", r"1\equiv 2", "1\u22612", "1/2=2"),
    *(r"\frac{4}{2} = 3 = 2", "2=1+2", "(1=2)", "{1=2}", r"\boxed{1=2}", r"\left(1=2\right)", "$1=2$", r"\(3=2\)"),
    *(r"1\to 2", r"2\to3", r"1\Rightarrow 2", r"1\implies 2", r"1\iff 2", "1 => 2", "1 -> 2", "1 <=> 2", "1 := 2"),
    *(r"x=1 \Rightarrow x=2", r"x = 1 \to x = 2", r"1\mapsto 2", r"1\leftrightarrow 2", r"1 \mid 2", "3 | 2"),
    *(r"1\setminus 2", r"1\wedge 2", r"1\land 2", r"1\parallel 2", r"1\choose 2", r"1\subset 2", r"1\ni 2", r"1\ll 2"),
    *("2..3", "2\u20263", r"1 \not= 2", "1 =/= 2", "1 <> 2", "1 ~ 2", r"1 \& 2", r"1\ast 2", r"2\hspace{1cm}3"),
    *(r"1\cong 2", "7 = 5 = 2", r"1 \lor 2", r"\frac{2}{3} = 2", r"x=3, 3=2", "f(1) = 3 = 2", r"\pi = 2"),
    *(r"2\underbrace{3}", r"3 = 2\text{ apples}", r"1\text{ m} = 2\text{ m}", r"2 \text{ to } 3", r"\sqrt{9} = 2"),
    *(r"\neq 2", r"\ne 2", r"\ge 2", r"\leq 2", "> 2", "\u2260 2", r"$\ge 2$", r"2\text{ or more}"),
    *(r"2\text{ (or }-2)", "2+3i=2", "3-i = 2", r"3 \pmod 5", r"2,3 \pmod 5", r"x\equiv 3\pmod{7}"),
    *("$1$$2$", r"\(1\) or \(2\)", "2&3", r"2,\ 3", r"2 \text{ unless } x=3, \text{ then } 3", "$2$ $3$"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    yield
    logging.disable(before)


def scorer(*expected: str) -> Callable[[str], Any]:
    return _mathematics({"expected": list(expected), "whole": False})


def is_right(score: Callable[[str], Any], answer: str) -> bool:
    try:
        return bool(score(answer) == 1.0)
    except Refused:
        return False


@pytest.mark.parametrize("expected", SAME)
def test_an_answer_is_right_in_all_its_forms(expected: str) -> None:
    score = scorer(expected)
    assert [answer for answer in SAME[expected] if not is_right(score, answer)] == []
    assert not is_right(score, "41")


def test_an_answer_that_names_several_results_is_not_right_by_one_of_them() -> None:
    assert len(HEDGES) >= 120
    score = scorer("2")
    assert [answer for answer in HEDGES if is_right(score, answer)] == []


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        (r"2 \pmod 5", [r"3 \pmod 5", r"2 \pmod 7", "5", "3", r"x \equiv 2,3 \pmod 5", r"5 \pmod 2", "7"]),
        (r"x \equiv 2 \pmod{5}", [r"x \equiv 3 \pmod{5}", "5", r"3\pmod 5", r"x\equiv 2\pmod 7"]),
        (r"x \equiv 2, 3 \pmod 5", [r"2 \pmod 5", r"2, 4 \pmod 5", "5"]),
        ("5", [r"2\pmod 5", r"x\equiv 2\pmod 5", r"6\pmod 5"]),
        ("[0,1)", ["0<x<1", r"0 \le x \le 1", r"0 \le x < 2", "(0,1]"]),
        ("3+4i", ["3-4i", "4+3i", "3"]),
    ],
)
def test_residues_bounds_and_complex_numbers_that_differ_are_wrong(expected: str, wrong: list[str]) -> None:
    score = scorer(expected)
    assert [answer for answer in wrong if is_right(score, answer)] == []


def test_expected_answers_that_cannot_be_read_are_refused_by_their_rows(tmp_path: Path) -> None:
    answers = [r"\$36", r"\frac{1}{2}", "7", "\\", r"\text{Evelyn}", "x=1", "$"]
    file = tmp_path / "a.jsonl"
    rule = {"comparison": "math", "extraction": "boxed"}
    rows = [{"statement": f"{place}?", "answer": {**rule, "expected": [each]}} for place, each in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = TasksSpec(kind="jsonl", path=str(file), evaluation_problems=0)

    report = check_file(file, "jsonl")
    assert ([fault["place"] for fault in report["faults"]], report["notes"]) == (["line 4", "line 7"], [])
    with pytest.raises(InvalidInput) as refused:
        load_tasks(spec)
    assert refused.value.code == "malformed_task"
    told = sorted(violation.message for violation in refused.value.violations)
    assert {violation.pointer for violation in refused.value.violations} == {"/tasks/path"}
    assert [message.split(": ")[0].rpartition(" ")[2] for message in told] == ["4", "7"]
    assert "nothing that math-verify can read" in told[0]

    file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["answer"]["expected"][0] not in ("\\", "$")))
    assert len(load_tasks(spec).train) == 5


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("LIBRARY", "no_such_package", "math-verify is not installed here"), ("READING_SECONDS", 0.001, "took more than")],
)
def test_answers_that_nobody_looked_at_are_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, reason: str
) -> None:
    monkeypatch.setattr(mathematics, name, value)
    file = tmp_path / "a.jsonl"
    answer = {"comparison": "math", "extraction": "boxed", "expected": ["$"]}
    file.write_text(json.dumps({"statement": "?", "answer": answer}) + "\n")
    (note,) = load_tasks(TasksSpec(kind="jsonl", path=str(file), evaluation_problems=0)).notes
    assert note.startswith("1 expected answers of the comparison math were not looked at")
    assert reason in note
    assert check_file(file, "jsonl")["notes"] == [note]
