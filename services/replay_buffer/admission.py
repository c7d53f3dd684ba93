"""What may enter the buffer: only trajectories that learning can use, judged and scored."""

from __future__ import annotations

import ast
import math

from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_UNSPECIFIED
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_INTERNAL_ERROR, OUTCOME_UNSPECIFIED


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise InvalidInput naming every field that makes the trajectory unusable (NaN, lengths, no verdict)."""
    tokens = len(trajectory.response_token_ids)
    faults = [
        ("/trajectory_id", "is missing", not trajectory.trajectory_id),
        ("/prompt_id", "is missing", not trajectory.prompt_id),
        ("/source", "is missing", trajectory.source == SOURCE_UNSPECIFIED),
        ("/prompt_token_ids", "are missing", not trajectory.prompt_token_ids),
        ("/response_token_ids", "are missing", tokens == 0),
        ("/verdict", "is missing", trajectory.verdict.outcome == OUTCOME_UNSPECIFIED),
        ("/verdict", "is a fault of the judge", trajectory.verdict.outcome == OUTCOME_INTERNAL_ERROR),
        ("/reward", "must be finite", not (trajectory.HasField("reward") and math.isfinite(trajectory.reward))),
        ("/sampling_logprobs", "do not match the tokens", len(trajectory.sampling_logprobs) not in (0, tokens)),
        ("/sampling_logprobs", "must be finite", not _finite(trajectory.sampling_logprobs)),
        ("/reference_logprobs", "do not match the tokens", len(trajectory.reference_logprobs) != tokens),
        ("/reference_logprobs", "must be finite", not _finite(trajectory.reference_logprobs)),
    ]
    violations = tuple(FieldViolation(pointer, message) for pointer, message, at_fault in faults if at_fault)
    if violations:
        raise InvalidInput(
            f"trajectory {trajectory.trajectory_id or '(no id)'} cannot be learnt from",
            code="unusable_trajectory",
            violations=violations,
        )


def content_digest(trajectory: Trajectory) -> str:
    """Digest under which offline trajectories of a prompt and source count as the same; '' for online ones.

    Two online samples with the same text are two draws of the policy, and both count.
    """
    if trajectory.source == SOURCE_ONLINE:
        return ""
    return redis_keys.digest(trajectory.prompt_id, str(trajectory.source), normalised_program(trajectory.response_text))


def normalised_program(text: str) -> str:
    """The program as its syntax tree says it, so that spacing and comments do not matter; else the stripped text."""
    try:
        return ast.unparse(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text.strip()


def _finite(numbers: object) -> bool:
    return all(math.isfinite(number) for number in numbers)  # type: ignore[attr-defined]
