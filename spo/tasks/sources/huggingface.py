"""Data sets of the Hugging Face hub on disk, without the package `datasets`: files, a clone's folder, or a saved one.

A split is a folder of its name (`save_to_disk`), or the files whose names begin with it (`train-00000.parquet`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from spo.errors import FieldViolation, InvalidInput
from spo.spec.task_sources import HuggingFaceSpec
from spo.tasks.faults import malformed, problems_of
from spo.tasks.jsonl import jsonl_problem
from spo.tasks.problem import Problem
from spo.tasks.records import SUFFIXES, Record, read_records, rows_of

_SPLITS = ("train", "test", "validation", "dev", "eval")


def read_huggingface(path: str, spec: HuggingFaceSpec, split: str | None) -> Iterator[Problem]:
    """Yield the problems of a split (None: the only one, or train); InvalidInput names rows, columns and splits."""
    files = _files_of(Path(path), split)
    names = {column.partition(".")[0] for column in spec.columns.model_dump(exclude_none=True).values()}

    def records(on_fault: Callable[[InvalidInput], None]) -> Iterator[Record]:
        if files is None:
            found = read_records(path, names, on_fault)
        else:
            found = itertools.chain.from_iterable(rows_of(file, names, on_fault) for file in files)
        return itertools.islice(found, spec.limit)

    return problems_of(records, lambda record: _problem(record, spec))


def _files_of(path: Path, split: str | None) -> list[Path] | None:
    """The files of a split in a folder; None: `path` is a file, or nothing that there is."""
    try:
        if not path.is_dir():
            return None
        found = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
    except (OSError, ValueError):
        return None
    # What the package keeps of a file's own work.
    files = [file for file in found if not file.name.startswith((".", "cache-"))]
    if not files:
        return None
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    wanted = split or ("train" if "train" in by_split else next(iter(by_split)) if len(by_split) == 1 else "")
    if wanted in by_split:
        _require_one_configuration(path, by_split[wanted])
        return by_split[wanted]
    message = f"{path} has the splits {', '.join(sorted(by_split))}" + (f", not {split}" if split else "; name one")
    violation = FieldViolation("/tasks/huggingface/split", message)
    raise InvalidInput(message, code="unknown_split", violations=(violation,))


def _require_one_configuration(path: Path, files: Sequence[Path]) -> None:
    """Raises InvalidInput where a split is of several configurations, each a data set of its own."""
    by_configuration = dict[str, Path]()
    for file in files:
        within = file.relative_to(path)
        folders = within.parts[:-1]
        # `save_to_disk` and some clones have a folder for each split.
        folders = folders[:-1] if folders and _split_of(within) == folders[-1] else folders
        by_configuration.setdefault("/".join(folder for folder in folders if folder != "data"), file.parent)
    if len(by_configuration) > 1:
        names = ", ".join(name or "the top folder's own" for name in sorted(by_configuration))
        folder = by_configuration[max(by_configuration)]
        message = f"{path} holds several configurations: {names}; name the folder of one, such as {folder}"
        violation = FieldViolation("/tasks/path", message)
        raise InvalidInput(message, code="several_configurations", violations=(violation,))


def _split_of(file: Path) -> str:
    """The split that a file's folder or name says; `data-00000-of-00001.arrow` of a saved split is in its folder."""
    stem = file.name.partition(".")[0]
    name = stem.rpartition("-of-")[0].rpartition("-")[0] if "-of-" in stem else stem
    if name in ("data", "") or (len(file.parts) > 1 and file.parts[-2] in _SPLITS):
        return file.parts[-2] if len(file.parts) > 1 else "train"
    named = [split for split in _SPLITS if name == split or name.startswith((f"{split}-", f"{split}_"))]
    return named[0] if named else name


def _problem(record: Record, spec: HuggingFaceSpec) -> Problem:
    """The problem of a row, by way of the platform's own schema: what that refuses is refused here."""
    reasons: list[str] = []
    row: dict[str, str | list[str]] = {}
    for part, column in spec.columns.model_dump(exclude_none=True).items():
        try:
            row[part] = _READ[part](_cell(record.fields, column), column)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise malformed(record.place, *reasons)
    return jsonl_problem(Record(record.place, _own_row(row, spec, record.place)))


def _cell(fields: object, column: str) -> object:
    """The value of a column, whose dots go into nested ones where no column has the whole name."""
    path = [column] if isinstance(fields, Mapping) and column in fields else column.split(".")
    value = fields
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            known = ", ".join(map(str, value))[:200] if isinstance(value, Mapping) else "no columns"
            raise ValueError(f"there is no column {column}; it has {known}")
        value = value[name]
    if value is None:
        raise ValueError(f"column {column} is null")
    return value


def _statement(value: object, column: str) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "user":
        value = value[0].get("content")
    if not isinstance(value, str):
        raise ValueError(f"column {column} is neither text nor a conversation of one user's message")
    return value


def _texts(value: object, column: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values):
        raise ValueError(f"column {column} holds neither text nor a list of texts")
    return [each if isinstance(each, str) else json.dumps(each) for each in values]


def _lines(value: object, column: str) -> str:
    return "\n".join(_texts(value, column))


_READ: dict[str, Callable[[object, str], str | list[str]]] = {
    "statement": _statement,
    **dict.fromkeys(("code", "before", "entry_point", "difficulty"), _lines),
    **dict.fromkeys(("answer", "inputs", "outputs", "solutions"), _texts),
}


def _own_row(row: Mapping[str, str | list[str]], spec: HuggingFaceSpec, place: str) -> dict[str, object]:
    """The row as JSONL of the platform's own schema has it."""
    after = f"\n\n{spec.instruction}" if spec.instruction else ""
    own: dict[str, object] = {"statement": f"{row['statement']}{after}", "human_solutions": row.get("solutions", [])}
    if "difficulty" in row:
        own["difficulty"] = row["difficulty"]
    if "answer" in row:
        expected = _expected(row["answer"], spec.answer.expected_after, place)
        own["answer"] = {"expected": expected, **spec.answer.model_dump(exclude={"expected_after"})}
    elif "code" in row:
        given = {name: row[name] for name in ("before", "entry_point", "code") if name in row}
        own["code_tests"] = {"style": spec.code_style, **given}
    else:
        inputs, outputs = row["inputs"], row["outputs"]
        if len(inputs) != len(outputs):
            raise malformed(place, f"{len(inputs)} inputs but {len(outputs)} outputs")
        pairs = zip(inputs, outputs, strict=True)
        own["tests"] = [{"stdin": given, "stdout": wanted} for given, wanted in pairs]
    return own


def _expected(answers: str | list[str], after: str, place: str) -> list[str]:
    if after and not all(after in answer for answer in answers):
        raise malformed(place, f"the answer holds no {after!r}, after which it should stand")
    return [answer.rpartition(after)[2].strip() if after else answer for answer in answers]
