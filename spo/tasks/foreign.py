"""What a file of another project is, row by row, and what the platform can make of it: problems, or experience.

A row that cannot be taken is refused with what is missing; nothing is guessed that a response would be judged by.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from spo.errors import FieldViolation, InvalidInput
from spo.tasks.foreign_answers import (
    AFTER_HASHES,
    Fields,
    Makes,
    Rule,
    Taken,
    Wish,
    answer_problem,
    asked,
    asks_for_a_box,
    choice_problem,
    conversation,
    logged,
    preference,
    require_text_alone,
    verl_problem,
)
from spo.tasks.foreign_programs import (
    VERL_PROGRAMS,
    apps,
    codeforces,
    eval_plus,
    live_code_bench,
    mbpp,
    problem_row,
    verified_by_itself,
    verl_program,
)
from spo.tasks.mathematics import unreadable
from spo.tasks.problem import Problem
from spo.tasks.records import (
    LINE_BYTES_MAXIMUM,
    ProblemRow,
    Record,
    jsonl_problem,
    malformed,
    parse_json,
    read_records,
    reasons_of,
)
from spo.tasks.sources import MARKER, code_contests_problem, function_problem

PLACES_SHOWN = 3
OWN_PROBLEMS = "problems of this platform"


@dataclass(frozen=True)
class Shape:
    """One project's rows: their name, how they are recognised, what is made of one, and the kind of `tasks` that reads
    such a file as it is ("": none)."""

    name: str
    is_shape: Callable[[Fields], bool]
    take: Callable[[Fields, Wish], Taken]
    kind: str = ""


def _has(*names: str) -> Callable[[Fields], bool]:
    return lambda fields: all(fields.get(name) is not None for name in names)


def _listed(name: str) -> Callable[[Fields], bool]:
    """Whether a column holds a conversation."""
    return lambda fields: isinstance(fields.get(name), Sequence) and not isinstance(fields.get(name), str)


def _any(*tests: Callable[[Fields], bool]) -> Callable[[Fields], bool]:
    return lambda fields: any(test(fields) for test in tests)


def _all(*tests: Callable[[Fields], bool]) -> Callable[[Fields], bool]:
    return lambda fields: all(test(fields) for test in tests)


def _column(*names: str) -> Callable[[Fields], bool]:
    """Whether a row has one of these columns, null or not."""
    return lambda fields: any(name in fields for name in names)


def _own(fields: Fields, _wish: Wish) -> Taken:
    try:
        ProblemRow.model_validate(fields)
    except ValidationError as error:
        raise ValueError("; ".join(reasons_of(error, ProblemRow.model_fields))) from None
    return Taken((dict(fields),))


def _own_experience(fields: Fields, _wish: Wish) -> Taken:
    return Taken((dict(fields),), "experience")


def _published(parse: Callable[[Record], Problem | None]) -> Callable[[Fields, Wish], Taken]:
    """A reader of `tasks.kind` as one of rows here."""

    def take(fields: Fields, _wish: Wish) -> Taken:
        try:
            problem = parse(Record("", dict(fields)))
        except InvalidInput as error:
            raise ValueError("; ".join(each.message.removeprefix(": ") for each in error.violations)) from None
        if problem is None:
            raise ValueError("it reads or writes files, and programs here have standard input and output alone")
        return Taken((problem_row(problem),))

    return take


def _gsm8k(fields: Fields, wish: Wish) -> Taken:
    prompt = str(fields["question"])
    rule: Rule | None = None if wish.rule or asks_for_a_box(prompt) else AFTER_HASHES
    return answer_problem({**fields, "question": prompt.strip()}, wish, rule)


def _without_decision(fields: Fields, _wish: Wish) -> Taken:
    asked(fields)
    raise ValueError(
        "only a question, and nothing decides about a response: an answer, tests, or `arguments` for tasks.verifier "
        "(docs/verifiers.md)"
    )


def _unknown(fields: Fields, wish: Wish) -> Taken:
    columns = ", ".join(map(str, fields))[:200]
    if fields.get("text") is not None:
        raise ValueError("running text: there is no question that a response would answer")
    # Names what is looked for, and where.
    asked(fields)
    return answer_problem(fields, wish) if columns else _without_decision(fields, wish)


def _is_gsm8k(fields: Fields) -> bool:
    return isinstance(fields.get("answer"), str) and MARKER in str(fields["answer"]) and "question" in fields


_ANSWERED = _column("answer", "solution", "ground_truth", "final_answer", "expected_answer")
_SAID = _any(_has("completion"), _has("response"), _has("output"))
# In this order: what says most about a row first.
PREFERENCES = "preferences (TRL)"
SHAPES: tuple[Shape, ...] = (
    Shape(
        OWN_PROBLEMS,
        _all(_has("statement"), _any(*map(_has, ("tests", "answer", "code_tests", "arguments", "verifier")))),
        _own,
        "jsonl",
    ),
    Shape(
        "experience of this platform", _all(_has("response_text"), _column("statement", "prompt_id")), _own_experience
    ),
    Shape(
        "OpenAI logs",
        _any(_has("request", "response"), _has("custom_id", "response"), _has("choices", "messages")),
        logged,
    ),
    Shape(
        "verl (programs)",
        _all(_has("reward_model"), lambda fields: fields.get("data_source") in VERL_PROGRAMS),
        verl_program,
    ),
    Shape("verl", _has("data_source", "reward_model"), verl_problem),
    Shape("SYNTHETIC-2 or Open-R1 (verification_info)", _has("verification_info"), verified_by_itself),
    Shape(
        "CodeContests",
        _all(_has("description"), _column("public_tests", "private_tests")),
        _published(code_contests_problem),
        "code_contests",
    ),
    Shape("Open-R1 Codeforces", _all(_has("description"), _column("official_tests")), codeforces),
    Shape("LiveCodeBench", _all(_has("question_content"), _column("public_test_cases")), live_code_bench),
    Shape("TACO or APPS", _has("question", "input_output"), apps),
    Shape("HumanEval or HumanEval+", _has("prompt", "entry_point", "test"), _published(function_problem), "human_eval"),
    Shape(
        "EvalPlus (inputs and a right solution)", _all(_has("prompt", "entry_point"), _column("base_input")), eval_plus
    ),
    Shape("MBPP or MBPP+", _all(_has("code"), _any(_has("test_list"), _has("test"))), mbpp),
    Shape("GSM8K", _is_gsm8k, _gsm8k, "gsm8k"),
    Shape("choices (ARC, MMLU)", _all(_column("question"), _any(_has("choices"), _has("options"))), choice_problem),
    Shape(PREFERENCES, _has("chosen", "rejected"), preference),
    Shape(
        "MATH",
        _all(_has("problem", "solution"), lambda fields: "answer" not in fields and "level" in fields),
        answer_problem,
    ),
    Shape("NuminaMath or Open-R1 Math", _all(_has("problem"), _column("solution")), answer_problem),
    Shape(
        "questions and answers",
        _all(_any(*map(_has, ("prompt", "question", "problem", "query"))), _ANSWERED),
        answer_problem,
    ),
    Shape("stepwise supervision (TRL)", _has("completions", "labels"), _unknown),
    Shape(
        "rated responses (TRL, unpaired preferences)",
        _all(_has("prompt", "completion"), _column("label")),
        conversation,
    ),
    Shape(
        "prompts and completions (TRL)",
        _all(_any(_has("prompt"), _has("instruction"), _has("question")), _SAID),
        conversation,
    ),
    Shape("ShareGPT", _listed("conversations"), conversation),
    Shape("chat", _listed("messages"), conversation),
    Shape("prompts alone", _any(_has("prompt"), _has("question"), _has("problem")), _without_decision),
)
_NO_SHAPE = Shape("no shape that is known here", lambda _: True, _unknown)


def shape_of(fields: Fields) -> Shape:
    """What a row is; the last resort is a shape whose rows are refused with what is missing."""
    return next((shape for shape in SHAPES if shape.is_shape(fields)), _NO_SHAPE)


@dataclass
class Findings:
    """What was found in a file. shapes and added: rows by shape and by instruction that was added.

    refused: why rows were, with their places. systems: rows by the system prompt before their question. rows: what was
    made, in order. kinds: the kinds of `tasks` that read such rows as they are, "" for none.
    """

    path: Path
    read: int = 0
    taken: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    systems: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[str]] = field(default_factory=dict)
    rows: list[dict[str, object]] = field(default_factory=list)
    makes: Makes = "problems"

    @property
    def run(self) -> str:
        """The run that an import of its responses makes."""
        return self.path.stem.replace(".", "_")

    @property
    def are_preferences(self) -> bool:
        """Whether its responses are pairs, of which one is better."""
        return set(self.shapes) == {PREFERENCES}

    def refuse(self, reason: str, place: str) -> None:
        """Note a row that cannot be taken."""
        self.refused.setdefault(reason, []).append(place)

    def refusal(self) -> InvalidInput:
        """The error for a file with rows that cannot be taken: each reason once."""
        count = sum(map(len, self.refused.values()))
        message = f"{count} of {self.read} rows cannot be taken" if count else f"{self.path} holds no row"
        violations = tuple(FieldViolation(place, reason) for reason, places in self.refused.items() for place in places)
        return InvalidInput(message, code="invalid_tasks", violations=violations)

    def reasons(self) -> list[str]:
        """Each reason once, the most frequent first, with how many rows it holds for and where the first are."""
        by_count = sorted(self.refused.items(), key=lambda pair: -len(pair[1]))
        return [f"{len(places)} rows: {reason} ({_places(places)})" for reason, places in by_count]


def _places(places: Sequence[str]) -> str:
    short = [place.rpartition(", ")[2] for place in places[:PLACES_SHOWN]]
    return ", ".join(short) + (", ..." if len(places) > PLACES_SHOWN else "")


def read_foreign(path: Path, wish: Wish | None = None, most: int | None = None) -> Findings:
    """Take the rows of a file, at most so many; InvalidInput where it cannot be read at all."""
    found = Findings(path)
    made: list[tuple[Record, Shape, Taken]] = []

    def note_fault(error: InvalidInput) -> None:
        found.read += 1
        place, _, reason = error.message.partition(": ")
        found.refuse(reason, place)

    for record in itertools.islice(_records(path, note_fault), most):
        found.read += 1
        try:
            shape, taken = _taken(record, wish or Wish())
        except ValidationError as error:
            found.refuse("; ".join(reasons_of(error, ProblemRow.model_fields)), record.place)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            found.refuse(str(error) or "it cannot be read", record.place)
        else:
            made.append((record, shape, taken))
    _keep(found, made)
    return found


def _taken(record: Record, wish: Wish) -> tuple[Shape, Taken]:
    fields = record.fields
    if not isinstance(fields, Mapping):
        raise ValueError("a row is a mapping of columns")
    shape = shape_of(fields)
    if shape.name != OWN_PROBLEMS:
        require_text_alone(fields)
    taken = shape.take(fields, wish)
    if taken.makes == "problems":
        for row in taken.rows:
            ProblemRow.model_validate(row)
    return shape, taken


def _keep(found: Findings, made: Sequence[tuple[Record, Shape, Taken]]) -> None:
    """Count what was made; rows whose mathematics nobody can compare are refused too."""
    makes = Counter(taken.makes for _, _, taken in made)
    found.makes = "experience" if makes["experience"] > makes["problems"] else "problems"
    problems = [
        jsonl_problem(Record(record.place, taken.rows[0])) for record, _, taken in made if taken.makes == "problems"
    ]
    faults = dict(fault.partition(": answer/expected: ")[::2] for fault in unreadable(problems)[0])
    systems = {taken.system for _, _, taken in made}
    for record, shape, taken in made:
        if record.place in faults:
            found.refuse(f"the answer {faults[record.place]}", record.place)
            continue
        if taken.makes != found.makes:
            found.refuse(
                f"it is {taken.makes}, and most rows are {found.makes}: one file cannot hold both", record.place
            )
            continue
        found.taken += 1
        found.shapes[shape.name] += 1
        found.kinds[shape.kind] += 1
        found.added.update([taken.added] if taken.added else [])
        found.notes.update([taken.note] if taken.note else [])
        found.systems.update([taken.system] if taken.system else [])
        found.rows += [_with_system(row, taken.system) if len(systems) > 1 else row for row in taken.rows]


def _with_system(row: dict[str, object], system: str) -> dict[str, object]:
    """A job has one system prompt, so that of rows which differ in theirs stands before the question."""
    return {**row, "statement": f"{system}\n\n{row['statement']}"} if system else row


def _records(path: Path, on_fault: Callable[[InvalidInput], None]) -> Iterator[Record]:
    if path.suffix != ".json" or not path.is_file():
        yield from read_records(path, None, on_fault)
        return
    if path.stat().st_size > LINE_BYTES_MAXIMUM:
        raise malformed(str(path), f"longer than {LINE_BYTES_MAXIMUM} bytes: write one row a line, as .jsonl")
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        rows = parse_json(text, str(path))
    except InvalidInput:
        # Some sets have lines in a file of this name.
        for number, line in enumerate(filter(str.strip, text.splitlines()), start=1):
            yield Record(f"{path}, line {number}", parse_json(line, f"{path}, line {number}"))
        return
    if isinstance(rows, Mapping):
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else [rows]
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield Record(f"{path}, row {number}", row)


def spec_lines(found: Findings, problems_path: Path) -> str:
    """The lines of a job's spec that take a file as it is, or the file that `spo convert rows` makes of it."""
    kind = next(iter(found.kinds)) if len(found.kinds) == 1 and not found.refused else ""
    path = found.path.absolute() if kind and found.path.suffix != ".json" else problems_path.absolute()
    held_out = min(200, found.taken // 10)
    lines = [
        "tasks:",
        f"  kind: {kind or 'jsonl'}",
        f"  path: {json.dumps(str(path), ensure_ascii=False)}",
        f"  evaluation_problems: {held_out}",
    ]
    if found.makes == "experience":
        lines[-1:] = [
            "  evaluation_problems: 0",
            "  # Decides about responses without a reward; it is not asked about what comes with one.",
            '  verifier: {kind: model, rubric: "Is this a good response? {statement} {response}"}',
        ]
    if found.are_preferences:
        lines += [
            "# DPO on the pairs, once they are imported:",
            "algorithm: {losses: [{objective: dpo, sources: [other_run]}]}",
            "value: null",
            f"offline: {{human_solutions: false, keep_reference_samples: false, experience: [{{run: {found.run}}}]}}",
            "replay: {mix: [{source: other_run, share: 1.0, sampler: pairs}]}",
        ]
    if len(found.systems) == 1 and found.systems.total() == found.taken:
        lines += ["model:", "  chat:", f"    system: {json.dumps(next(iter(found.systems)), ensure_ascii=False)}"]
    return "\n".join(lines) + "\n"
