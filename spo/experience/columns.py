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

from spo.v1.prompt_pb2 import Prompt, Source
from spo.v1.trajectory_pb2 import Annotation, FinishReason, Trajectory
from spo.v1.verdict_pb2 import Outcome, Verdict

FORMAT = "1"

_TEXT, _WORDS = pyarrow.string(), pyarrow.list_(pyarrow.string())
_COUNT, _NUMBER, _FLAG = pyarrow.int64(), pyarrow.float64(), pyarrow.bool_()
_TOKENS, _LOGPROBS = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())
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
    ]
)
# Columns that a message has under the same name.
_OF_TRAJECTORY = (
    "trajectory_id",
    "run_id",
    "group_id",
    "sample_index",
    "licence",
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
_OF_PROMPT = ("task_set", "prompt_id", "tests_digest", "language", "response_format")
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
        "source": Source.Name(trajectory.source).removeprefix("SOURCE_").lower(),
        "finish_reason": FinishReason.Name(trajectory.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "statement": prompt.text,
        "statement_digest": statement_digest(prompt.text),
        "content_digest": content_digest(trajectory.response_text),
        "reference_dtype": row.reference_dtype,
        "reward": trajectory.reward if trajectory.HasField("reward") else None,
        "outcome": Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower() if judged else None,
        "annotation_positions": [annotation.position for annotation in trajectory.annotations],
        "annotation_rollouts": [annotation.rollouts for annotation in trajectory.annotations],
        "annotation_successes": [annotation.successes for annotation in trajectory.annotations],
    }


def _stored(fields: Mapping[str, Any]) -> StoredTrajectory:
    known: dict[str, Any] = {name: fields[name] for name in _OF_TRAJECTORY if fields[name] is not None}
    lists: dict[str, Any] = {name: fields[name] or [] for name in _LISTS_OF_TRAJECTORY}
    trajectory = Trajectory(
        **known,
        **lists,
        prompt_id=fields["prompt_id"],
        source=Source.Value(f"SOURCE_{fields['source'].upper()}"),
        finish_reason=FinishReason.Value(f"FINISH_REASON_{fields['finish_reason'].upper()}"),
        annotations=_annotations(fields),
    )
    if fields["reward"] is not None:
        trajectory.reward = fields["reward"]
    if fields["outcome"] is not None:
        outcome = Outcome.Value(f"OUTCOME_{fields['outcome'].upper()}")
        found: dict[str, Any] = {name: fields[name] for name in _OF_VERDICT if fields[name] is not None}
        trajectory.verdict.CopyFrom(Verdict(outcome=outcome, **found))
    prompt = Prompt(text=fields["statement"], **{name: fields[name] for name in _OF_PROMPT})
    return StoredTrajectory(trajectory, prompt, fields["reference_dtype"])


def _annotations(fields: Mapping[str, Any]) -> Sequence[Annotation]:
    columns = (fields[f"annotation_{name}"] or [] for name in ("positions", "rollouts", "successes"))
    return [
        Annotation(position=position, rollouts=rollouts, successes=successes)
        for position, rollouts, successes in zip(*columns, strict=True)
    ]
