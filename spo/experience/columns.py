"""The columns of a stored trajectory, and the way between them and the messages of the wire.

One row is one trajectory with its prompt, its verdict and its lineage: everything that learning from it needs without
the run that made it. docs/experience.md describes every column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
from blake3 import blake3

from spo.model.chat import USUAL, reasoning_characters
from spo.spec.section import wire_name, wire_number
from spo.v1.prompt_pb2 import Prompt, Source
from spo.v1.trajectory_pb2 import Annotation, FinishReason, Segment, SegmentKind, Trajectory
from spo.v1.verdict_pb2 import Outcome, PartScore, Verdict

FORMAT = "1"

_TEXT, _WORDS = pyarrow.string(), pyarrow.list_(pyarrow.string())
_COUNT, _NUMBER, _FLAG = pyarrow.int64(), pyarrow.float64(), pyarrow.bool_()
_TOKENS, _LOGPROBS = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())
_SCORES = pyarrow.list_(pyarrow.float64())
SCHEMA = pyarrow.schema(
    [
        ("trajectory_id", _TEXT),
        ("run_id", _TEXT),
        ("group_id", _TEXT),
        ("sample_index", _COUNT),
        ("parents", _WORDS),
        ("licence", _TEXT),
        ("source", _TEXT),
        ("sampler", _TEXT),
        ("policy_version_first", _COUNT),
        ("policy_version_last", _COUNT),
        ("temperature", _NUMBER),
        ("top_p", _NUMBER),
        ("seed", pyarrow.uint64()),
        ("created_unix_ms", _COUNT),
        ("task_set", _TEXT),
        ("prompt_id", _TEXT),
        ("statement", _TEXT),
        ("statement_digest", _TEXT),
        ("tests_digest", _TEXT),
        ("language", _TEXT),
        ("response_format", _TEXT),
        ("prompt_token_ids", _TOKENS),
        ("response_token_ids", _TOKENS),
        ("response_text", _TEXT),
        ("content_digest", _TEXT),
        ("finish_reason", _TEXT),
        ("sampling_logprobs", _LOGPROBS),
        ("reference_logprobs", _LOGPROBS),
        ("reference_hash", _TEXT),
        ("reference_dtype", _TEXT),
        ("reward", _NUMBER),
        ("outcome", _TEXT),
        ("tests_passed", _COUNT),
        ("tests_total", _COUNT),
        ("public_tests_passed", _COUNT),
        ("public_tests_total", _COUNT),
        ("suspected_hard_coded", _FLAG),
        ("judge_version", _TEXT),
        ("isolation", _TEXT),
        ("annotation_positions", _TOKENS),
        ("annotation_rollouts", _TOKENS),
        ("annotation_successes", _TOKENS),
        ("segment_kinds", _WORDS),
        ("segment_tokens", _TOKENS),
        ("segment_characters", _TOKENS),
        ("segment_scores", _SCORES),
        ("segment_labels", _WORDS),
        ("environment", _TEXT),
        ("environment_json", _TEXT),
        ("score", _NUMBER),
        ("part_names", _WORDS),
        ("part_scores", _SCORES),
        ("consent", _TEXT),
        ("said_by", _TEXT),
    ]
)
# Columns that files written before them lack: read as empty.
ADDED = frozenset(
    {
        "segment_kinds",
        "segment_tokens",
        "segment_characters",
        "segment_scores",
        "segment_labels",
        "environment",
        "environment_json",
        "score",
        "part_names",
        "part_scores",
        "consent",
        "said_by",
    }
)
# Columns that a message has under the same name.
_OF_TRAJECTORY = (
    "trajectory_id",
    "run_id",
    "group_id",
    "sample_index",
    "licence",
    "consent",
    "said_by",
    "sampler",
    "policy_version_first",
    "policy_version_last",
    "temperature",
    "top_p",
    "seed",
    "created_unix_ms",
    "response_text",
    "reference_hash",
)
_LISTS_OF_TRAJECTORY = (
    "parents",
    "prompt_token_ids",
    "response_token_ids",
    "sampling_logprobs",
    "reference_logprobs",
)
_OF_PROMPT = (
    "task_set",
    "prompt_id",
    "tests_digest",
    "language",
    "response_format",
    "environment",
    "environment_json",
)
_OF_VERDICT = (
    "tests_passed",
    "tests_total",
    "public_tests_passed",
    "public_tests_total",
    "suspected_hard_coded",
    "judge_version",
    "isolation",
)


@dataclass(frozen=True)
class StoredTrajectory:
    """A trajectory with its prompt and the precision (JobSpec's dtype) in which pi0 scored it; '' when unscored."""

    trajectory: Trajectory
    prompt: Prompt
    reference_dtype: str = ""


def table_of(rows: Iterable[StoredTrajectory]) -> pyarrow.Table:
    """The rows as a table, in the order of their prompts, so that one prompt's rows lie together."""
    ordered = sorted(rows, key=lambda row: (row.prompt.prompt_id, row.trajectory.trajectory_id))
    return pyarrow.Table.from_pylist([fields_of(row) for row in ordered], schema=SCHEMA)


def rows_of(table: pyarrow.Table) -> list[StoredTrajectory]:
    """The inverse of table_of."""
    return [_stored(fields) for fields in table.to_pylist()]


def completed(table: pyarrow.Table, columns: Sequence[str]) -> pyarrow.Table:
    """These columns of a table, in this order; those that its file lacks because it is older are null."""
    for name in columns:
        if name in ADDED and name not in table.column_names:
            table = table.append_column(SCHEMA.field(name), pyarrow.nulls(len(table), SCHEMA.field(name).type))
    return table.select(columns)


def statement_digest(statement: str) -> str:
    """Under which statements count as the same: their words, whatever the spacing."""
    return _digest(" ".join(statement.split()))


def content_digest(response_text: str) -> str:
    """Under which responses to a prompt count as the same, before programs are compared by their syntax."""
    return _digest(response_text.strip())


def _digest(text: str) -> str:
    # What comes from files may hold half a character.
    return blake3(text.encode("utf-8", "replace")).hexdigest(16)


def fields_of(row: StoredTrajectory) -> dict[str, Any]:
    """The row by column, as plain values."""
    trajectory, prompt, verdict = row.trajectory, row.prompt, row.trajectory.verdict
    judged = trajectory.HasField("verdict")
    return {
        **{name: getattr(trajectory, name) for name in _OF_TRAJECTORY},
        **{name: list(getattr(trajectory, name)) for name in _LISTS_OF_TRAJECTORY},
        **{name: getattr(prompt, name) for name in _OF_PROMPT},
        **{name: getattr(verdict, name) if judged else None for name in _OF_VERDICT},
        "source": wire_name(Source, trajectory.source),
        "finish_reason": wire_name(FinishReason, trajectory.finish_reason),
        "statement": prompt.text,
        "statement_digest": statement_digest(prompt.text),
        "content_digest": content_digest(trajectory.response_text),
        "reference_dtype": row.reference_dtype,
        "reward": trajectory.reward if trajectory.HasField("reward") else None,
        "outcome": wire_name(Outcome, verdict.outcome) if judged else None,
        "score": verdict.score if verdict.HasField("score") else None,
        "part_names": [part.name for part in verdict.parts],
        "part_scores": [part.score for part in verdict.parts],
        "annotation_positions": [annotation.position for annotation in trajectory.annotations],
        "annotation_rollouts": [annotation.rollouts for annotation in trajectory.annotations],
        "annotation_successes": [annotation.successes for annotation in trajectory.annotations],
        **segment_fields(trajectory.segments),
    }


def _stored(fields: Mapping[str, Any]) -> StoredTrajectory:
    known: dict[str, Any] = {name: fields[name] for name in _OF_TRAJECTORY if fields[name] is not None}
    lists: dict[str, Any] = {name: fields[name] or [] for name in _LISTS_OF_TRAJECTORY}
    trajectory = Trajectory(
        **known,
        **lists,
        prompt_id=fields["prompt_id"],
        source=wire_number(Source, fields["source"]),
        finish_reason=wire_number(FinishReason, fields["finish_reason"]),
        annotations=_annotations(fields),
        segments=segments_of(fields),
    )
    # As most models mark it; a job reads stored responses as its own.
    trajectory.reasoning_characters = reasoning_characters(trajectory, lambda text, _: USUAL.reasoning_length(text))
    if fields["reward"] is not None:
        trajectory.reward = fields["reward"]
    if fields["outcome"] is not None:
        outcome = wire_number(Outcome, fields["outcome"])
        found: dict[str, Any] = {name: fields[name] for name in _OF_VERDICT if fields[name] is not None}
        names, scores = fields["part_names"] or [], fields["part_scores"] or []
        parts = [PartScore(name=name, score=score) for name, score in zip(names, scores, strict=True)]
        trajectory.verdict.CopyFrom(Verdict(outcome=outcome, score=fields["score"], parts=parts, **found))
    asked: dict[str, Any] = {name: fields[name] for name in _OF_PROMPT if fields[name] is not None}
    prompt = Prompt(text=fields["statement"], **asked)
    return StoredTrajectory(trajectory, prompt, fields["reference_dtype"])


def _annotations(fields: Mapping[str, Any]) -> Sequence[Annotation]:
    columns = (fields[f"annotation_{name}"] or [] for name in ("positions", "rollouts", "successes"))
    return [
        Annotation(position=position, rollouts=rollouts, successes=successes)
        for position, rollouts, successes in zip(*columns, strict=True)
    ]


def segment_fields(segments: Iterable[Segment]) -> dict[str, list[Any]]:
    """Segments by column, one element each."""
    known = list(segments)
    return {
        "segment_kinds": [wire_name(SegmentKind, segment.kind) for segment in known],
        "segment_tokens": [segment.tokens for segment in known],
        "segment_characters": [segment.characters for segment in known],
        "segment_scores": [segment.score if segment.HasField("score") else None for segment in known],
        "segment_labels": [segment.label for segment in known],
    }


def segments_of(fields: Mapping[str, Any]) -> list[Segment]:
    """The inverse of segment_fields. Raises ValueError on lists of different lengths or an unknown kind."""
    columns = (fields[f"segment_{name}"] or [] for name in ("kinds", "tokens", "characters", "scores", "labels"))
    return [
        Segment(
            kind=wire_number(SegmentKind, kind), tokens=tokens, characters=characters, score=score, label=label or ""
        )
        for kind, tokens, characters, score, label in zip(*columns, strict=True)
    ]
