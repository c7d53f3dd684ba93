"""Imports: rows of an uploaded file, or of another program's log, as stored trajectories.

A row of an import: a response to a problem that a task set knows, perhaps with a reward.
Only what cannot be recomputed is taken from a file: verdicts and log-probs of pi0 are made here.

Rows of other programs' logs in our columns: which of their fields is which of ours, and nothing else of them.
A path goes into objects and lists, and into text that is JSON: `request.messages.-1.content` is the content of the last
message. `a.b|c` is what lies at c where nothing that suits the column lies at a.b.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput, storage_faults_named
from spo.experience.columns import SCHEMA, StoredTrajectory, content_digest, segments_of, statement_digest
from spo.experience.parquet_child import PRINTED_BYTES, REFUSED
from spo.model.chat import USUAL, action_mask, reasoning_characters, segment_faults, segments_of_mask
from spo.tasks.problem import Problem
from spo.v1.prompt_pb2 import SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FinishReason, Segment, Trajectory

UploadFormat = Literal["jsonl", "parquet"]

ROWS_MAXIMUM = 1_000_000
ROW_BYTES_MAXIMUM = 4 << 20
READER_SECONDS = 600

RESPONSE_CHARACTERS_MAXIMUM = 1 << 20
TOKENS_MAXIMUM = 1_000_000
LOWEST_REWARD = -1000.0

Token = Annotated[int, Field(ge=0, lt=2**31)]
# What rounding adds to a log-prob or a reward of 0 is taken off.
ROUNDING = 1e-6
Logprob = Annotated[float, Field(le=ROUNDING), AfterValidator(lambda logprob: min(0.0, logprob))]
Word = Annotated[str, Field(max_length=200)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=-ROUNDING, le=1 + ROUNDING), AfterValidator(lambda share: min(1.0, max(0.0, share)))]

MOST_FIELDS = 40
_ONE_PATH = r"[^.|]{1,200}(\.[^.|]{1,200}){0,15}"
_PATH = re.compile(rf"{_ONE_PATH}(\|{_ONE_PATH}){{0,7}}")
_NUMBER = re.compile(r"-?[0-9]{1,6}")
# What an object or a list cannot be: then the next path of several is looked at.
_TEXTS = ("statement", "response_text", "trajectory_id", "sampler")


@dataclass(frozen=True)
class UploadedRow:
    """One row, counted from 1: its fields, or why it has none."""

    number: int
    fields: dict[str, Any] | None
    code: str = ""
    message: str = ""


def uploaded_rows(body: bytes, upload_format: UploadFormat) -> Iterator[UploadedRow]:
    """The rows in order; a row that is malformed or too long says so.

    Raises InvalidInput (code "bad_upload") when the file as a whole cannot be read or is too large.
    """
    lines = body.split(b"\n") if upload_format == "jsonl" else _parquet_lines(body)
    number = 0
    for line in lines:
        if line.strip():
            number += 1
            if number > ROWS_MAXIMUM:
                raise refused(f"more than {ROWS_MAXIMUM} rows; cut the file into several")
            yield _parsed(number, line)


def refused(reason: str) -> InvalidInput:
    """The error for a file that cannot be read as a whole."""
    return InvalidInput("the file cannot be imported", code="bad_upload", violations=(FieldViolation("/", reason),))


def _parsed(number: int, line: bytes) -> UploadedRow:
    if len(line) > ROW_BYTES_MAXIMUM:
        return UploadedRow(number, None, "oversize_row", f"longer than {ROW_BYTES_MAXIMUM} bytes")
    try:
        fields = json.loads(line)
        # Half a character is valid JSON, but nothing could store or read it.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return UploadedRow(number, None, "malformed_row", f"not valid JSON: {str(error)[:200]}")
    if not isinstance(fields, dict):
        return UploadedRow(number, None, "malformed_row", "not a JSON object")
    # A null column of Parquet is an absent field.
    return UploadedRow(number, {name: value for name, value in fields.items() if value is not None})


def _parquet_lines(body: bytes) -> Iterator[bytes]:
    """What the confined reader prints; its output is bounded too, since small files may unpack to anything."""
    with tempfile.TemporaryDirectory(prefix="spo-upload-") as folder:
        path, printed, said = (os.path.join(folder, name) for name in ("upload.parquet", "rows", "errors"))
        with storage_faults_named(folder, len(body)), open(path, "wb") as stream:
            stream.write(body)
        with open(printed, "wb") as rows, open(said, "wb") as errors:
            status = _run_confined(path, rows, errors)
        if status != 0:
            with open(said, encoding="utf-8", errors="replace") as stream:
                reason = stream.read(2000).strip().splitlines()
            limits = f"unpacks to more than {PRINTED_BYTES} bytes, or broke its reader"
            raise refused(reason[-1] if status == REFUSED and reason else limits)
        with open(printed, "rb") as lines:
            yield from lines


def _run_confined(path: str, rows: BinaryIO, errors: BinaryIO) -> int:
    command = [sys.executable, "-m", "spo.experience.parquet_child", path]
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=rows,
            stderr=errors,
            env=environment,
            timeout=READER_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


class ImportRow(BaseModel):
    """The schema of a row; statement or prompt_id says which problem it is about."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    response_text: str = Field(min_length=1, max_length=RESPONSE_CHARACTERS_MAXIMUM)
    statement: str = Field(default="", max_length=RESPONSE_CHARACTERS_MAXIMUM)
    prompt_id: Word = ""
    reward: float | None = None
    finish_reason: Literal["stop", "length", "unspecified"] = "stop"
    prompt_token_ids: list[Token] = Field(default=[], max_length=TOKENS_MAXIMUM)
    response_token_ids: list[Token] = Field(default=[], max_length=TOKENS_MAXIMUM)
    sampling_logprobs: list[Logprob] = Field(default=[], max_length=TOKENS_MAXIMUM)
    # 1 at response tokens that the policy sampled, 0 at an environment's; verl and TRL have their own words for it.
    loss_mask: list[bool] = Field(
        default=[],
        max_length=TOKENS_MAXIMUM,
        validation_alias=AliasChoices("loss_mask", "response_mask", "completion_mask"),
    )
    segment_kinds: list[Literal["action", "observation", "branch"]] = Field(default=[], max_length=TOKENS_MAXIMUM)
    segment_tokens: list[Count] = Field(default=[], max_length=TOKENS_MAXIMUM)
    segment_characters: list[Count] = Field(default=[], max_length=TOKENS_MAXIMUM)
    segment_scores: list[Share | None] = Field(default=[], max_length=TOKENS_MAXIMUM)
    segment_labels: list[Word] = Field(default=[], max_length=TOKENS_MAXIMUM)
    environment: Word = ""
    environment_json: str = Field(default="", max_length=RESPONSE_CHARACTERS_MAXIMUM)
    reference_hash: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    sampler: Word = ""
    temperature: float = Field(default=0, ge=0, le=100)
    top_p: float = Field(default=0, ge=0, le=1)
    policy_version_first: int = Field(default=0, ge=0, lt=2**62)
    policy_version_last: int = Field(default=0, ge=0, lt=2**62)
    created_unix_ms: int = Field(default=0, ge=0, lt=2**62)
    trajectory_id: Word = ""
    licence: Word = ""
    consent: Word = ""


# A file of our own format has more columns: what is recomputed, and what only its own store knows.
IGNORED = frozenset(SCHEMA.names) - frozenset(ImportRow.model_fields)


@dataclass(frozen=True)
class RowRefusal(Exception):
    """Why a row cannot be imported."""

    code: str
    pointer: str
    message: str


@dataclass(frozen=True)
class ImportTerms:
    """What the import says of all its rows; reward = scale * given + shift. model_hash '' where no model is named."""

    run: str
    task_set: str
    reward_scale: float = 1.0
    reward_shift: float = 0.0
    needs_reward: bool = False
    ignores_rewards: bool = False
    model_hash: str = ""
    licence: str = ""


class ProblemIndex:
    """The problems of a task set by id and by statement."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._by_id = {problem.problem_id: problem for problem in problems}
        self._by_statement: dict[str, Problem | None] = {}
        for problem in self._by_id.values():
            # A statement of several problems names none of them.
            digest = statement_digest(problem.statement)
            self._by_statement[digest] = None if digest in self._by_statement else problem

    def find(self, prompt_id: str, statement: str) -> Problem | None:
        """The problem with this id, else the only one with this statement."""
        found = self._by_id.get(prompt_id)
        return found or (self._by_statement.get(statement_digest(statement)) if statement else None)

    def is_ambiguous(self, statement: str) -> bool:
        """Whether several problems have this statement."""
        digest = statement_digest(statement)
        return digest in self._by_statement and self._by_statement[digest] is None


def stored_row(row: UploadedRow, problems: ProblemIndex, terms: ImportTerms) -> StoredTrajectory:
    """The row as it will be stored, without a verdict. Raises RowRefusal."""
    if row.fields is None:
        raise RowRefusal(row.code, "", row.message)
    parsed = _parse(row.fields)
    problem = _problem_of(parsed, problems)
    _check_tokens(parsed, terms)
    segments = _segments(parsed, judged=parsed.reward is None or terms.ignores_rewards)
    trained_T = action_mask(segments, len(parsed.response_token_ids))
    name = terms.licence or parsed.licence
    trajectory = Trajectory(
        trajectory_id=_id(terms, problem, parsed),
        group_id=f"import-{problem.problem_id[:24]}",
        run_id=terms.run,
        parents=[parsed.trajectory_id] if parsed.trajectory_id else [],
        licence=name,
        prompt_id=problem.problem_id,
        source=SOURCE_OTHER_RUN,
        finish_reason=FinishReason.Value(f"FINISH_REASON_{parsed.finish_reason.upper()}"),
        segments=segments,
        # What nobody sampled has no log-prob, whatever a file says.
        sampling_logprobs=[
            logprob if trained else 0.0 for logprob, trained in zip(parsed.sampling_logprobs, trained_T, strict=False)
        ],
        **{name: getattr(parsed, name) for name in _TAKEN},
    )
    trajectory.reasoning_characters = reasoning_characters(trajectory, lambda text, _: USUAL.reasoning_length(text))
    reward = _reward(parsed, terms)
    if reward is not None:
        trajectory.reward = reward
    return StoredTrajectory(trajectory, _prompt(problem, terms, parsed))


_TAKEN = (
    "response_text", "prompt_token_ids", "response_token_ids", "reference_hash", "sampler", "temperature", "top_p",
    "policy_version_first", "policy_version_last", "created_unix_ms", "consent",
)  # fmt: skip


def _parse(fields: Mapping[str, Any]) -> ImportRow:
    try:
        return ImportRow.model_validate({name: value for name, value in fields.items() if name not in IGNORED})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        kind = str(first["type"])
        code = {"missing": "missing_field", "extra_forbidden": "unknown_field"}.get(kind, "malformed_row")
        if kind in ("string_too_long", "too_long"):
            code = "oversize_row"
        pointer = "".join(f"/{step}" for step in first["loc"])
        raise RowRefusal(code, pointer, str(first["msg"])) from None


def _problem_of(row: ImportRow, problems: ProblemIndex) -> Problem:
    if not (row.prompt_id or row.statement):
        raise RowRefusal("missing_field", "/statement", "neither prompt_id nor statement says which problem it is")
    problem = problems.find(row.prompt_id, row.statement)
    if problem is None:
        pointer = "/prompt_id" if row.prompt_id else "/statement"
        if row.statement and problems.is_ambiguous(row.statement):
            message = "several problems of the task set have this statement; name one by its prompt_id"
            raise RowRefusal("unknown_problem", pointer, message)
        raise RowRefusal("unknown_problem", pointer, "the task set has no such problem")
    return problem


def _check_tokens(row: ImportRow, terms: ImportTerms) -> None:
    tokens = len(row.response_token_ids)
    if (tokens or row.prompt_token_ids) and not (tokens and row.prompt_token_ids and row.reference_hash):
        message = "tokens need prompt_token_ids, response_token_ids and the reference_hash of the model they belong to"
        raise RowRefusal("missing_field", "/reference_hash", message)
    if terms.model_hash and row.reference_hash not in ("", terms.model_hash):
        raise RowRefusal("foreign_tokenizer", "/reference_hash", "the tokens are another model's; leave them out")
    if len(row.sampling_logprobs) not in (0, tokens):
        raise RowRefusal("malformed_row", "/sampling_logprobs", "as many as response_token_ids, or none")


def _segments(row: ImportRow, *, judged: bool) -> list[Segment]:
    """The turns of a conversation, by segments or by a mask; none of a single turn. Raises RowRefusal.

    judged: the row is to be judged here, which reads the text of the last turn.
    """
    if not (row.segment_kinds or row.loss_mask):
        return []
    tokens = len(row.response_token_ids)
    if not tokens:
        raise RowRefusal("missing_field", "/response_token_ids", "turns are turns of tokens, and there are none")
    if row.loss_mask and len(row.loss_mask) != tokens:
        raise RowRefusal("malformed_row", "/loss_mask", f"{len(row.loss_mask)} for {tokens} response tokens")
    found = _given_segments(row) if row.segment_kinds else segments_of_mask(row.loss_mask)
    faults = segment_faults(found, tokens, len(row.response_text) if any(row.segment_characters) else None)
    if faults:
        pointer, reason = faults[0]
        raise RowRefusal("malformed_row", pointer, reason)
    if row.loss_mask and not np.array_equal(action_mask(found, tokens), np.array(row.loss_mask)):
        raise RowRefusal("malformed_row", "/loss_mask", "says otherwise than the segments")
    if len(found) == 1 and not row.segment_kinds:
        return []
    if judged and not any(row.segment_characters):
        message = "where the turns stand in the text is not known, so nothing can be judged; give it, or a reward"
        raise RowRefusal("missing_field", "/segment_characters", message)
    return found


def _given_segments(row: ImportRow) -> list[Segment]:
    count = len(row.segment_kinds)
    columns: dict[str, list[Any]] = {
        "segment_kinds": list(row.segment_kinds),
        "segment_tokens": list(row.segment_tokens),
        "segment_characters": list(row.segment_characters) or [0] * count,
        "segment_scores": list(row.segment_scores) or [None] * count,
        "segment_labels": list(row.segment_labels) or [""] * count,
    }
    for name, values in columns.items():
        if len(values) != count:
            raise RowRefusal("malformed_row", f"/{name}", f"{len(values)} for {count} segments")
    return segments_of(columns)


def _reward(row: ImportRow, terms: ImportTerms) -> float | None:
    if row.reward is None or terms.ignores_rewards:
        if terms.needs_reward:
            raise RowRefusal("missing_field", "/reward", "is missing, and nothing is to be judged")
        return None
    reward = terms.reward_scale * row.reward + terms.reward_shift
    if not (math.isfinite(reward) and LOWEST_REWARD - ROUNDING <= reward <= ROUNDING):
        message = f"{terms.reward_scale:g} * {row.reward:g} + {terms.reward_shift:g} = {reward:g} is not in [-1000, 0]"
        raise RowRefusal("reward_out_of_range", "/reward", message)
    return min(0.0, max(LOWEST_REWARD, reward))


def _id(terms: ImportTerms, problem: Problem, row: ImportRow) -> str:
    """The same row imported twice under a name is the same trajectory."""
    content = content_digest(row.response_text)
    return "traj_" + redis_keys.digest(terms.run, problem.problem_id, content, repr(row.reward))[:32]


def _prompt(problem: Problem, terms: ImportTerms, row: ImportRow) -> Prompt:
    return Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set=terms.task_set,
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
        environment=row.environment,
        environment_json=row.environment_json,
    )


def check_mapping(fields: Mapping[str, str]) -> None:
    """Raises InvalidInput with a pointer to each name that is no column of ours, and each path that is none."""
    known = set(ImportRow.model_fields)
    violations = [
        FieldViolation(f"/fields/{name}", message)
        for name, path in fields.items()
        for wrong, message in (
            (name not in known, f"no column of an import; there are {', '.join(sorted(known))}"),
            (_PATH.fullmatch(path) is None, "a path is names with dots between them"),
        )
        if wrong
    ]
    if len(fields) > MOST_FIELDS:
        violations.append(FieldViolation("/fields", f"at most {MOST_FIELDS}"))
    if violations:
        raise InvalidInput("the fields cannot be mapped", code="bad_mapping", violations=tuple(violations))


def mapped(row: UploadedRow, fields: Mapping[str, str]) -> UploadedRow:
    """The row with the fields that the mapping names, where it has them; the row itself without a mapping."""
    if row.fields is None or not fields:
        return row
    found = {name: _first(row.fields, paths, text=name in _TEXTS) for name, paths in fields.items()}
    reward = found.get("reward")
    if isinstance(reward, bool):
        found["reward"] = float(reward)
    return replace(row, fields={name: value for name, value in found.items() if value is not None})


def _first(row: object, paths: str, *, text: bool) -> object:
    """What lies at the first path at which something suitable lies; None where nothing does."""
    lying = (_at(row, path.split(".")) for path in paths.split("|"))
    return next((found for found in lying if found is not None and (not text or isinstance(found, str))), None)


def _at(value: object, steps: Sequence[str]) -> object:
    """What lies at a path; None where nothing does. A field whose name has dots in it is found by its whole name."""
    if not steps:
        return value
    if isinstance(value, str):
        value = _path_parsed(value)
    if isinstance(value, dict):
        taken = next((n for n in range(len(steps), 0, -1) if ".".join(steps[:n]) in value), 0)
        return _at(value[".".join(steps[:taken])], steps[taken:]) if taken else None
    if isinstance(value, list) and _NUMBER.fullmatch(steps[0]) and -len(value) <= int(steps[0]) < len(value):
        return _at(value[int(steps[0])], steps[1:])
    return None


def _path_parsed(text: str) -> object:
    """The object or list that a text is as JSON; None where it is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
