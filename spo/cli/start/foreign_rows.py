"""Rows of data sets made for verl and TRL as rows of the platform's own problem files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from spo.errors import FieldViolation, InvalidInput
from spo.tasks.jsonl import ProblemRow
from spo.tasks.records import Record, read_records

COLUMNS = (
    *("prompt", "question", "problem", "messages", "data_source", "reward_model"),
    *("solution", "answer", "ground_truth", "completion"),
)
ANSWER_COLUMNS = ("ground_truth", "answer", "solution")
# verl's data sources -> how its own scorers find and compare an answer.
RULES: dict[str, dict[str, str]] = {
    "openai/gsm8k": {"extraction": "after_marker", "marker": "####", "comparison": "numeric"},
    "lighteval/MATH": {"extraction": "boxed", "comparison": "math"},
    "DigitalLearningGmbH/MATH-lighteval": {"extraction": "boxed", "comparison": "math"},
    "HuggingFaceH4/MATH-500": {"extraction": "boxed", "comparison": "math"},
}
MOST_FAULTS = 20


@dataclass(frozen=True)
class ConvertedRows:
    """Rows for a problem file, and the system prompts that stood before the questions."""

    rows: list[dict[str, object]]
    systems: tuple[str, ...]


def convert_rows(path: Path, rule: Mapping[str, str], answer: str | None = None) -> ConvertedRows:
    """Convert a JSONL or Parquet file; `rule` decides for rows whose data source says nothing, `answer` names a column.

    Raises InvalidInput with the place of each bad row.
    """
    rows: list[dict[str, object]] = []
    systems: dict[str, None] = {}
    faults: list[FieldViolation] = []
    for record in _records(path, answer):
        try:
            row, system = _converted(record, rule, answer)
            ProblemRow.model_validate(row)
        except ValidationError as error:
            faults.append(FieldViolation(record.place, str(error.errors()[0]["msg"])))
        except ValueError as error:
            faults.append(FieldViolation(record.place, str(error)))
        else:
            rows.append(row)
            systems |= {system: None} if system else {}
    if faults or not rows:
        message = f"{len(faults)} rows cannot be converted" if faults else f"{path} holds no row"
        raise InvalidInput(message, code="invalid_tasks", violations=tuple(faults[:MOST_FAULTS]))
    return ConvertedRows(rows, tuple(systems))


def _records(path: Path, answer: str | None) -> Iterator[Record]:
    return read_records(path, (*COLUMNS, answer) if answer else COLUMNS)


def _converted(record: Record, rule: Mapping[str, str], answer: str | None) -> tuple[dict[str, object], str]:
    fields = record.fields
    if not isinstance(fields, dict):
        raise ValueError("a row is a mapping of columns")
    statement, system = _asked(fields)
    chosen = RULES.get(str(fields.get("data_source")), rule)
    row: dict[str, object] = {"statement": statement, "answer": {"expected": [_truth(fields, answer)], **chosen}}
    if completion := _said(fields.get("completion")):
        row["human_solutions"] = [completion]
    return row, system


def _asked(fields: Mapping[str, object]) -> tuple[str, str]:
    """The question and the system prompt before it, of text or of messages."""
    names = ("prompt", "question", "problem", "messages")
    asked = next((fields[name] for name in names if fields.get(name) is not None), None)
    if isinstance(asked, str) and asked:
        return asked, ""
    if not isinstance(asked, Sequence) or not asked:
        raise ValueError(f"no question: it is looked for in {', '.join(names)}")
    said = [(str(turn.get("role")), turn.get("content")) for turn in asked if isinstance(turn, Mapping)]
    system = "\n".join(str(text) for role, text in said if role == "system")
    questions = [text for role, text in said if role != "system"]
    if len(questions) != 1 or not isinstance(questions[0], str):
        raise ValueError("a conversation of several turns: see docs/conversations.md")
    return questions[0], system


def _truth(fields: Mapping[str, object], answer: str | None) -> str:
    reward = fields.get("reward_model")
    found = reward.get("ground_truth") if isinstance(reward, Mapping) else None
    for name in (answer,) if answer else ANSWER_COLUMNS:
        found = fields.get(name) if found is None or answer else found
    if not isinstance(found, str | int | float):
        raise ValueError("no answer: it is looked for in reward_model.ground_truth, " + ", ".join(ANSWER_COLUMNS))
    return str(found)


def _said(completion: object) -> str:
    """A completion as text, of text or of one message."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and len(completion) == 1 and isinstance(completion[0], Mapping):
        return str(completion[0].get("content", ""))
    return ""
