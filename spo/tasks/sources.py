"""Task sets that others made, in their own columns: contests, functions, GSM8K, data sets on disk, and reasoning-
gym's generators.

HumanEval (Chen et al., 2021) and MBPP (Austin et al., 2021): a function to be completed, and asserts that decide.
The statement is the beginning of the function. A response may go on from there or write the function anew, as it is or
in a block of code.

Data sets of the Hugging Face hub on disk, without the package `datasets`: files, a clone's folder, or a saved one.
A split is a folder of its name (`save_to_disk`), or the files whose names begin with it (`train-00000.parquet`).

Problems of the package reasoning-gym: generators with scorers, endless train and held-out problems by seed.
Training and held-out problems come from seeds in two halves that never meet, whatever the seeds of their jobs are; a
question that small generators make in both is held out only.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from blake3 import blake3
from pydantic import Field, model_validator

from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.spec.tasks import GeneratorSpec, HuggingFaceSpec
from spo.tasks.answer import ANSWER_LANGUAGE, number_of
from spo.tasks.generate import Answer, Entry, Wanted
from spo.tasks.problem import (
    DEFAULT_LIMITS,
    STATEMENT_BYTES_MAXIMUM,
    Columns,
    Problem,
    TaskSets,
    ask_for_program,
    first_distinct,
    make_test_set,
)
from spo.tasks.records import (
    SUFFIXES,
    Record,
    jsonl_problem,
    malformed,
    parse_json,
    parse_record,
    problems_of,
    read_problems,
    read_records,
    rows_of,
    syntax_fault,
)
from spo.v1 import verdict_pb2 as wire

PYTHON3 = 3
DIFFICULTIES = ("unknown", "easy", "medium", "hard", "harder", "hardest", "external", *"ABCDEFGHIJKLMNOPQRSTUV")

_NUMBER = re.compile(r"\d+(\.\d+)?")
_UNITS = {"kilobytes": 1 << 10, "megabytes": 1 << 20, "gigabytes": 1 << 30}

MARKER = "####"
GSM8K_INSTRUCTION = f"Think step by step. End with a line of its own: {MARKER} and then the number."
# What the published solutions note for a calculator, such as <<16-3-4=9>>.
_CALCULATED = re.compile(r"<<[^<>]*>>")

_SPLITS = ("train", "test", "validation", "dev", "eval")

LIBRARY = "reasoning_gym"
TAG = "answer"
GYM_INSTRUCTION = f"Put the final answer between <{TAG}> and </{TAG}>."
MAKING_SECONDS = 240
HELD_OUT_FROM = 1 << 31
SEEDS = 1 << 30
# By generator and part.
Made = list[list[list[Entry]]]
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")


class PublishedTests(Columns):
    """Two parallel columns: one input and one output per test."""

    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()

    @model_validator(mode="after")
    def columns_are_parallel(self) -> Self:
        if len(self.input) != len(self.output):
            raise ValueError(f"{len(self.input)} inputs but {len(self.output)} outputs")
        return self

    def cases(self, *, public: bool) -> list[wire.TestCase]:
        """Return the tests as the judge knows them."""
        pairs = zip(self.input, self.output, strict=True)
        return [wire.TestCase(stdin=given.encode(), stdout=wanted.encode(), public=public) for given, wanted in pairs]


class PublishedSolutions(Columns):
    """Two parallel columns: one language number and one source per solution."""

    language: tuple[int, ...] = ()
    solution: tuple[str, ...] = ()

    @model_validator(mode="after")
    def columns_are_parallel(self) -> Self:
        if len(self.language) != len(self.solution):
            raise ValueError(f"{len(self.language)} languages but {len(self.solution)} solutions")
        return self

    def in_python(self) -> tuple[str, ...]:
        """Return the Python 3 programs."""
        pairs = zip(self.language, self.solution, strict=True)
        return first_distinct(program for language, program in pairs if language == PYTHON3)


class PublishedTimeLimit(Columns):
    seconds: int = Field(default=0, ge=0, le=3600)
    nanos: int = Field(default=0, ge=0, lt=1_000_000_000)

    def in_seconds(self) -> float:
        """Return the limit as a number of seconds, 0 where none was published."""
        return self.seconds + self.nanos * 1e-9


class CodeContestsRecord(Columns):
    description: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    public_tests: PublishedTests = PublishedTests()
    private_tests: PublishedTests = PublishedTests()
    generated_tests: PublishedTests = PublishedTests()
    solutions: PublishedSolutions = PublishedSolutions()
    incorrect_solutions: PublishedSolutions = PublishedSolutions()
    difficulty: int = Field(default=0, ge=0, lt=len(DIFFICULTIES))
    time_limit: PublishedTimeLimit = PublishedTimeLimit()
    memory_limit_bytes: int = Field(default=0, ge=0, lt=1 << 40)
    input_file: str = ""
    output_file: str = ""


def read_code_contests(path: str | Path) -> Iterator[Problem]:
    """Yield the problems that read standard input and write standard output; others cannot be judged here."""
    return read_problems(path, CodeContestsRecord.model_fields, code_contests_problem)


def code_contests_problem(record: Record) -> Problem | None:
    """The problem of a row, None when it reads or writes files. Raises InvalidInput naming its place."""
    row = parse_record(CodeContestsRecord, record)
    if row.input_file or row.output_file:
        return None
    cases = [
        *row.public_tests.cases(public=True),
        *row.private_tests.cases(public=False),
        *row.generated_tests.cases(public=False),
    ]
    if not cases:
        raise malformed(record.place, "the problem has no tests")
    return Problem(
        statement=ask_for_program(row.description),
        tests=make_test_set(cases, row.time_limit.in_seconds(), row.memory_limit_bytes),
        response_format="fenced",
        human_solutions=row.solutions.in_python(),
        wrong_solutions=row.incorrect_solutions.in_python(),
        difficulty=DIFFICULTIES[row.difficulty],
        place=record.place,
    )


class TacoRecord(Columns):
    """`solutions` and `input_output` are JSON within text; limits are phrases such as "2.0 seconds"."""

    question: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    input_output: str = Field(min_length=1)
    solutions: str = ""
    difficulty: str = "unknown"
    time_limit: str = ""
    memory_limit: str = ""


class TacoSolutions(Columns):
    programs: tuple[str, ...]


class TacoTests(Columns):
    """A side of a test is its text or, in some problems, its lines."""

    inputs: tuple[str | tuple[str, ...], ...]
    outputs: tuple[str | tuple[str, ...], ...]

    @model_validator(mode="after")
    def columns_are_parallel(self) -> Self:
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.outputs)} outputs")
        if not self.inputs:
            raise ValueError("the problem has no tests")
        return self


def read_taco(path: str | Path) -> Iterator[Problem]:
    """Yield the problems that read standard input and write standard output; calls of a function cannot be judged.

    TACO flags no test as public.
    """
    return read_problems(path, TacoRecord.model_fields, taco_problem)


def taco_problem(record: Record) -> Problem | None:
    """The problem of a row, None when it calls a function. Raises InvalidInput naming its place."""
    row = parse_record(TacoRecord, record)
    tests = _parse_column(record, "input_output", row.input_output)
    if isinstance(tests, dict) and tests.get("fn_name"):
        return None
    columns = parse_record(TacoTests, Record(f"{record.place}, input_output", tests))
    cases = [
        wire.TestCase(stdin=_text(given), stdout=_text(wanted))
        for given, wanted in zip(columns.inputs, columns.outputs, strict=True)
    ]
    return Problem(
        statement=ask_for_program(row.question),
        tests=make_test_set(cases, _cpu_seconds(row, record), _memory_bytes(row, record)),
        response_format="fenced",
        human_solutions=_programs(row, record),
        difficulty=row.difficulty.lower(),
        place=record.place,
    )


def _parse_column(record: Record, column: str, text: str) -> Any:
    return parse_json(text, f"{record.place}, {column}")


def _programs(row: TacoRecord, record: Record) -> tuple[str, ...]:
    if not row.solutions:
        return ()
    programs = _parse_column(record, "solutions", row.solutions)
    return first_distinct(
        parse_record(TacoSolutions, Record(f"{record.place}, solutions", {"programs": programs})).programs
    )


def _text(side: str | tuple[str, ...]) -> bytes:
    return (side if isinstance(side, str) else "\n".join(side)).encode()


def _cpu_seconds(row: TacoRecord, record: Record) -> float:
    if not row.time_limit:
        return 0.0
    return _leading_number(row.time_limit, record)


def _memory_bytes(row: TacoRecord, record: Record) -> int:
    if not row.memory_limit:
        return 0
    unit = row.memory_limit.split()[-1].lower()
    return int(_leading_number(row.memory_limit, record) * _UNITS.get(unit, 1))


def _leading_number(phrase: str, record: Record) -> float:
    found = _NUMBER.match(phrase)
    if found is None:
        raise malformed(record.place, f"{phrase!r} is no limit")
    return float(found.group())


class Gsm8kRecord(Columns):
    question: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    answer: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)


def read_gsm8k(path: str | Path) -> Iterator[Problem]:
    """Yield the problems of a file or folder in GSM8K's published columns."""
    return read_problems(path, Gsm8kRecord.model_fields, gsm8k_problem)


def gsm8k_problem(record: Record) -> Problem:
    """The problem of a row. Raises InvalidInput naming its place."""
    row = parse_record(Gsm8kRecord, record)
    expected = row.answer.rpartition(MARKER)[2].strip() if MARKER in row.answer else ""
    if number_of(expected) is None:
        raise malformed(record.place, f"answer: no number stands after {MARKER}")
    return Problem(
        statement=f"{row.question.strip()}\n\n{GSM8K_INSTRUCTION}",
        tests=wire.TestSet(
            answer=wire.AnswerRule(
                expected=[expected],
                comparison=wire.AnswerComparison.ANSWER_COMPARISON_NUMERIC,
                extraction=wire.AnswerExtraction.ANSWER_EXTRACTION_AFTER_MARKER,
                marker=MARKER,
            )
        ),
        language=ANSWER_LANGUAGE,
        response_format="raw",
        human_solutions=(_CALCULATED.sub("", row.answer).strip(),),
        place=record.place,
    )


class FunctionRecord(Columns):
    """`prompt` and `canonical_solution` are the two halves of a function; `test` defines check(candidate)."""

    prompt: str = Field(min_length=1, max_length=STATEMENT_BYTES_MAXIMUM)
    entry_point: str = Field(min_length=1, max_length=200)
    test: str = Field(min_length=1, max_length=1 << 20)
    canonical_solution: str = ""


def read_functions(path: str | Path) -> Iterator[Problem]:
    """Yield the problems of a file or folder in the columns that HumanEval was published in."""
    return read_problems(path, FunctionRecord.model_fields, function_problem)


def function_problem(record: Record) -> Problem:
    """The problem of a row. Raises InvalidInput naming its place."""
    row = parse_record(FunctionRecord, record)
    if not row.entry_point.isidentifier():
        raise malformed(record.place, f"entry_point: {row.entry_point[:80]!r} is no name of a function")
    if reason := syntax_fault(row.test):
        raise malformed(record.place, f"test: cannot be compiled: {reason}")
    whole = row.prompt + row.canonical_solution
    # Two of MBPP's solutions mix tabs and spaces, so that they do not go on from their prompts.
    solved = bool(row.canonical_solution.strip()) and not syntax_fault(whole)
    return Problem(
        statement=row.prompt,
        tests=wire.TestSet(
            code_tests=wire.CodeTests(
                style=wire.CodeTestStyle.CODE_TEST_STYLE_COMPLETION,
                before=row.prompt,
                code=f"{row.test.rstrip()}\n\n{_call(row.entry_point)}\n",
                entry_point=row.entry_point,
            ),
            limits=DEFAULT_LIMITS,
        ),
        response_format="fenced",
        human_solutions=(whole.strip() + "\n",) if solved else (),
        place=record.place,
    )


def _call(entry_point: str) -> str:
    # Two of MBPP's functions have the name of what tests them.
    return "import solution\n\ncheck(solution.check)" if entry_point == "check" else f"check({entry_point})"


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


def gym_tasks(spec: TasksSpec) -> TaskSets:
    """The problems of a spec's generators, mixed by weight. Raises InvalidInput naming the generator at fault."""
    require_package("reasoning_gym", "/tasks/kind")
    held_out = _shares(spec.generators, spec.evaluation_problems)
    train = _shares(spec.generators, spec.most_train_problems)
    made = _made([_wanted(spec, index, held_out[index], train[index]) for index in range(len(spec.generators))])
    _require_enough(spec.generators, made, list(zip(held_out, train, strict=True)))
    evaluation = {problem.statement: problem for problem in _problems(spec, made, 0)}
    training = {problem.statement: problem for problem in _problems(spec, made, 1)}
    return TaskSets(
        train=_shuffled(spec.seed, [problem for text, problem in training.items() if text not in evaluation]),
        evaluation=_shuffled(spec.seed, list(evaluation.values())),
    )


def _wanted(spec: TasksSpec, index: int, held_out: int, train: int) -> Wanted:
    """What is asked of a generator: held-out problems first, so that no question of theirs is trained on."""
    generator = spec.generators[index]
    seed = int.from_bytes(blake3(f"{spec.seed} {index}".encode()).digest()[:8], "big") % SEEDS
    parts = [(HELD_OUT_FROM + seed, held_out), (seed, train)]
    return {"name": generator.name, "settings": dict(generator.settings), "parts": parts}


def require_package(module: str, pointer: str) -> None:
    """Raises InvalidInput (code "package_missing") where a package is not installed."""
    if importlib.util.find_spec(module) is None:
        message = f"the package {module.replace('_', '-')} is not installed; pip install 'spo-platform[tasks]'"
        raise InvalidInput(message, code="package_missing", violations=(FieldViolation(pointer, message),))


def _shares(generators: Sequence[GeneratorSpec], count: int) -> list[int]:
    """How many problems each generator makes, `count` together: by weight, the largest remainders rounded up."""
    total = sum(generator.weight for generator in generators)
    exact = [count * generator.weight / total for generator in generators]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: count - sum(shares)]:
        shares[index] += 1
    return shares


def _made(generators: Sequence[Wanted]) -> Made:
    """The entries of each generator and part, made in a process whose hash seed is always the same."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "spo.tasks.generate"],
            input=json.dumps({"generators": generators}).encode(),
            capture_output=True,
            env={**environment, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            timeout=MAKING_SECONDS,
            check=False,
        )
        answer: Answer = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        raise _refused(f"the problems could not be made in {MAKING_SECONDS} s: ask for fewer, or for others") from None
    except ValueError:
        reason = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise _refused(f"the problems could not be made: {reason or 'their maker was ended'}") from None
    if faults := answer.get("faults"):
        violations = tuple(FieldViolation(f"/tasks/generators/{index}/{field}", why) for index, field, why in faults)
        raise InvalidInput(
            "the generators cannot be used as they are", code="unusable_generator", violations=violations
        )
    return answer["made"]


def _require_enough(
    generators: Sequence[GeneratorSpec],
    made: Made,
    wanted: Sequence[tuple[int, int]],
) -> None:
    violations = tuple(
        FieldViolation(
            f"/tasks/generators/{index}",
            f"{generators[index].name} made {sum(map(len, parts))} different problems with these settings, of "
            f"{sum(wanted[index])} wanted: widen its settings, lower its weight, or ask for fewer",
        )
        for index, parts in enumerate(made)
        if sum(map(len, parts)) < sum(wanted[index])
    )
    if violations:
        raise InvalidInput("too few problems", code="too_few_problems", violations=violations)


def _problems(spec: TasksSpec, made: Made, part: int) -> Iterator[Problem]:
    for generator, parts in zip(spec.generators, made, strict=True):
        for entry in parts[part]:
            yield gym_problem(generator.name, entry)


def gym_problem(name: str, entry: Entry) -> Problem:
    """The problem of an entry, which the data set's own scorer decides."""
    arguments = json.dumps({"dataset": name, "entry": entry, "tag": TAG}, sort_keys=True)
    answer = entry.get("answer")
    return Problem(
        statement=f"{str(entry['question']).strip()}\n\n{GYM_INSTRUCTION}",
        tests=wire.TestSet(scoring_function=wire.ScoringFunction(library=LIBRARY, arguments_json=arguments)),
        language=ANSWER_LANGUAGE,
        response_format="raw",
        human_solutions=(f"<{TAG}>{answer}</{TAG}>",) if answer else (),
        difficulty=name,
        arguments_json=json.dumps({"entry": entry}, sort_keys=True),
    )


def _shuffled(seed: int, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(problems, key=lambda problem: blake3(f"{seed} {problem.statement}".encode()).digest()))


def _refused(message: str) -> InvalidInput:
    violation = FieldViolation("/tasks/generators", message)
    return InvalidInput(message, code="unusable_generator", violations=(violation,))
