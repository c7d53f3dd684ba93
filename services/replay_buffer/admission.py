"""Which trajectories may be inserted: only complete ones that training can use, judged and scored."""

from __future__ import annotations

import ast
import math
import re
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Literal

import numpy as np

from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput
from spo.model.chat import segment_faults, trained_mask
from spo.rpc.client import MAX_TRAJECTORY_BYTES
from spo.spec.job_spec import JobSpec
from spo.tasks.problem import extract_program
from spo.v1.prompt_pb2 import SOURCE_MEMORY, SOURCE_ONLINE, SOURCE_SHARED, SOURCE_UNSPECIFIED, Source
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_INTERNAL_ERROR, OUTCOME_UNSPECIFIED

# Longer texts are compared as they stand: deep nesting costs the parser more than the comparison is worth.
MAX_PARSED_CHARACTERS = 20_000
# Memory is drawn from what was inserted under another name.
_SOURCES = frozenset(Source.values()) - {SOURCE_UNSPECIFIED, SOURCE_MEMORY}
# Log-probs in nats: rounding may lift one a little above 0; below, no softmax in single precision gives a token that is
# sampled, or that a text holds, so little.
MOST_LOGPROB = 1e-3
LEAST_LOGPROB = -1e4
# Rewards are scores below 0 of a few units; a sum of exponentials knows nothing of so small ones.
LEAST_REWARD = -1e6
# Versions beyond one a step: those of leases that ended before they published.
SPARE_VERSIONS = 10_000
# Sampled by a policy under training: they carry its log-probs, and equal ones are not duplicates.
_LIVE = frozenset({SOURCE_ONLINE, SOURCE_SHARED})
# Ids are parts of Redis keys and of members joined by colons.
_ID = re.compile(r"[\w.-]{1,200}")
# `warnings.catch_warnings` changes the whole process.
_PARSER = threading.Lock()


def check_judged(run_id: str, spec: JobSpec, trajectory: Trajectory) -> None:
    """Raise InvalidInput naming every field that is wrong before reference log-probs are asked for."""
    tokens = len(trajectory.response_token_ids)
    sampled = len(trajectory.sampling_logprobs)
    reward, outcome = trajectory.reward, trajectory.verdict.outcome
    grouped = spec.replay.unit == "group" and trajectory.source == SOURCE_ONLINE
    faults = [
        ("/trajectory_id", "is not an id", not _ID.fullmatch(trajectory.trajectory_id)),
        ("/run_id", f"is not {run_id}", trajectory.run_id != run_id),
        ("/prompt_id", "is not an id", not _ID.fullmatch(trajectory.prompt_id)),
        ("/source", "is missing or unknown", trajectory.source not in _SOURCES),
        ("/prompt_token_ids", "are missing", not trajectory.prompt_token_ids),
        ("/prompt_token_ids", "are too many", len(trajectory.prompt_token_ids) > spec.model.max_prompt_tokens),
        ("/response_token_ids", "are missing", tokens == 0),
        ("/response_token_ids", "are too many", tokens > spec.most_response_tokens),
        ("/verdict", "is missing", outcome == OUTCOME_UNSPECIFIED),
        ("/verdict", "is a fault of the judge", outcome == OUTCOME_INTERNAL_ERROR),
        ("/reward", "is missing", not trajectory.HasField("reward")),
        # The theory needs r <= 0: exp(r / beta) is a probability.
        ("/reward", "must be finite and at most 0", not (math.isfinite(reward) and reward <= 0)),
        ("/sampling_logprobs", "do not match the tokens", sampled not in (0, tokens)),
        ("/sampling_logprobs", "are missing", trajectory.source in _LIVE and sampled == 0),
        ("/reward", f"must not be below {LEAST_REWARD:g}", reward < LEAST_REWARD),
        *_logprob_faults("/sampling_logprobs", trajectory.sampling_logprobs),
        ("/prompt_token_ids", "must not be negative", min(trajectory.prompt_token_ids, default=0) < 0),
        ("/response_token_ids", "must not be negative", min(trajectory.response_token_ids, default=0) < 0),
        ("/group_id", "is not an id", grouped and not _ID.fullmatch(trajectory.group_id)),
    ]
    _refuse(trajectory, [*faults, *_conversation_faults(trajectory)])
    size = trajectory.ByteSize()
    if size > MAX_TRAJECTORY_BYTES:
        raise InvalidInput(
            f"trajectory {trajectory.trajectory_id} has {size} bytes, more than the {MAX_TRAJECTORY_BYTES} that can be"
            " passed on in a message",
            code="trajectory_too_large",
        )


def check_live(spec: JobSpec, prompts: Container[str] | None, trajectory: Trajectory) -> None:
    """Raise InvalidInput where a trajectory of the live stream cannot be this run's policy's own.

    prompts: ids of the run's problems; None where they are not known.
    """
    first, last = trajectory.policy_version_first, trajectory.policy_version_last
    unknown = prompts is not None and trajectory.prompt_id not in prompts
    most = spec.trainer.steps + SPARE_VERSIONS
    faults = [
        ("/source", "is not that of a live sample", trajectory.source != SOURCE_ONLINE),
        ("/prompt_id", "is no problem of the run", unknown),
        ("/policy_version_first", "is not a version", not 0 <= first <= most),
        ("/policy_version_last", "is not a version", not 0 <= last <= most),
        ("/policy_version_last", "is before the first", last < first),
    ]
    _refuse(trajectory, faults)


def check_scored(spec: JobSpec, trajectory: Trajectory) -> None:
    """Raise InvalidInput when the reference log-probs are wrong; a trainer with its own reference needs none."""
    scored = len(trajectory.reference_logprobs)
    lengths = {len(trajectory.response_token_ids)} | ({0} if spec.trainer.reference == "in_trainer" else set())
    faults = [
        ("/reference_logprobs", "do not match the tokens", scored not in lengths),
        *_logprob_faults("/reference_logprobs", trajectory.reference_logprobs),
        ("/reference_logprobs", "must be 0 at observations", _speaks_of_observations(trajectory, "reference_logprobs")),
    ]
    _refuse(trajectory, faults)


def _conversation_faults(trajectory: Trajectory) -> list[tuple[str, str, bool]]:
    """What makes a conversation's turns no turns of this response; empty for a response of a single turn."""
    segments = trajectory.segments
    if not segments:
        return []
    tokens = len(trajectory.response_token_ids)
    faults = segment_faults(segments, tokens, len(trajectory.response_text))
    if faults:
        return [(pointer, reason, True) for pointer, reason in faults]
    trained_T = trained_mask(trajectory)
    misplaced = [
        (f"/annotations/{index}/position", "does not follow a token that the policy sampled", True)
        for index, annotation in enumerate(trajectory.annotations)
        if annotation.position and not (annotation.position <= tokens and trained_T[annotation.position - 1])
    ]
    said = _speaks_of_observations(trajectory, "sampling_logprobs")
    return [*misplaced, ("/sampling_logprobs", "must be 0 at observations", said)]


def _speaks_of_observations(trajectory: Trajectory, name: Literal["sampling_logprobs", "reference_logprobs"]) -> bool:
    """Whether log-probs, one per token, are not 0 at tokens that the policy did not sample."""
    logprobs_T = np.asarray(getattr(trajectory, name))
    if not trajectory.segments or len(logprobs_T) != len(trajectory.response_token_ids):
        return False
    return bool(logprobs_T[~trained_mask(trajectory)].any())


def split_by(
    check: Callable[[Trajectory], None], trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], list[InvalidInput]]:
    """The trajectories that pass a check, and the errors of the others."""
    valid: list[Trajectory] = []
    refusals: list[InvalidInput] = []
    for trajectory in trajectories:
        try:
            check(trajectory)
            valid.append(trajectory)
        except InvalidInput as refusal:
            refusals.append(refusal)
    return valid, refusals


def content_digest(trajectory: Trajectory) -> str:
    """Digest by which offline trajectories of a prompt are deduplicated; '' for live ones, which never are.

    Two samples of a policy with the same text are two samples, and both count. Offline ones are only compared within a
    source, so that no source can empty another's share, and within a reward, so that a flaky failure never hides a
    success.
    """
    if trajectory.source in _LIVE:
        return ""
    content = normalised_program(trajectory.response_text)
    return redis_keys.digest(trajectory.prompt_id, str(trajectory.source), repr(trajectory.reward), content)


def normalised_program(response_text: str) -> str:
    """The program printed from its syntax tree, without spacing and comments; the stripped text where it has none.

    Of several blocks the first and the last both count: which of them is judged is the problem's `response_format`.
    """
    if (whole := _printed(response_text)) is not None:
        return whole
    blocks = dict.fromkeys(extract_program(response_text, name) for name in ("fenced", "fenced_last"))
    programs = [_printed(block) for block in blocks]
    if all(program is None for program in programs):
        return response_text.strip()
    return repr([program or block.strip() for program, block in zip(programs, blocks, strict=True)])


def _printed(text: str) -> str | None:
    """A program as its syntax tree prints; None for a text that is none, or too long."""
    if len(text) > MAX_PARSED_CHARACTERS:
        return None
    try:
        # Programs with odd escapes warn on stderr, which belongs to the log.
        with _PARSER, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.unparse(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _refuse(trajectory: Trajectory, faults: Iterable[tuple[str, str, bool]]) -> None:
    violations = tuple(FieldViolation(pointer, message) for pointer, message, at_fault in faults if at_fault)
    if violations:
        raise InvalidInput(
            f"trajectory {trajectory.trajectory_id[:200] or '(no id)'} cannot be learnt from",
            code="unusable_trajectory",
            violations=violations,
        )


def _logprob_faults(pointer: str, logprobs: Sequence[float]) -> list[tuple[str, str, bool]]:
    if not _finite(logprobs):
        return [(pointer, "must be finite", True)]
    logprobs_T = np.asarray(logprobs, dtype=np.float64)
    return [
        (pointer, "must be at most 0, as logarithms of probabilities", bool((logprobs_T > MOST_LOGPROB).any())),
        (pointer, f"must not be below {LEAST_LOGPROB:g} nats", bool((logprobs_T < LEAST_LOGPROB).any())),
    ]


def _finite(numbers: Sequence[float]) -> bool:
    # Single-precision numbers cannot overflow a double's sum, and NaN or infinities never leave one. An array is made
    # of a message's numbers at once; walking through them one by one takes ten times as long.
    with np.errstate(invalid="ignore"):
        return math.isfinite(np.asarray(numbers).sum(dtype=np.float64))
