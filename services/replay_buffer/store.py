"""The buffer in Redis: a ledger of trajectories with payloads, counters and recorded batches, and whether it can
hold more.

Trajectories as serialized bytes: a cache of those seen last, and the response of SampleBatch made of them.
Decoding a payload only to encode it again would take most of the time of a batch. So the response is written here as
protobuf's wire format has it: a field is its number and type, and for anything but a number also its length.

Redis evicts nothing. What has left the window of its run and no batch may name again is taken out by
`archive.WindowTrimmer`, once the experience store has it.

Which trajectories may be inserted: only complete ones that training can use, judged and scored.
"""

from __future__ import annotations

import ast
import math
import re
import struct
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from services.replay_buffer.windows import SOURCES, fact_of, ids_of, read_fact, source_name, without_mark
from spo import observability, redis_keys
from spo.errors import FieldViolation, IntegrityError, InvalidInput, NotFound
from spo.messaging.redis_client import RedisClient, RedisScript
from spo.messaging.run_specs import RunSpecs, estimates_are_pending, run_state, write_of_run
from spo.model.chat import segment_faults, trained_mask
from spo.observability import get_logger
from spo.rpc.client import MAX_MESSAGE_BYTES, MAX_TRAJECTORY_BYTES, PART_BYTES, chunks_by_bytes
from spo.spec.job_spec import JobSpec, SourceName
from spo.spec.reward import has_succeeded
from spo.spec.section import ESTIMATED, TERMINAL, decode_state
from spo.tasks.problem import extract_program
from spo.v1.prompt_pb2 import SOURCE_MEMORY, SOURCE_ONLINE, SOURCE_SHARED, SOURCE_UNSPECIFIED, Source
from spo.v1.replay_service_pb2 import Outline, SampleBatchResponse, SampledTrajectory
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


_LENGTH_DELIMITED, _DOUBLE = 2, 1
_BATCH = bytes([SampleBatchResponse.BATCH_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_TRAJECTORY = bytes([SampledTrajectory.TRAJECTORY_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_VALUE = struct.Struct("<BdBd")
_QHAT_0_TAG = SampledTrajectory.QHAT_0_FIELD_NUMBER << 3 | _DOUBLE
_ERROR_TAG = SampledTrajectory.QHAT_0_ERROR_FIELD_NUMBER << 3 | _DOUBLE

# What a trajectory holds by token, and what training does not read.
ByToken = Literal["prompt_token_ids", "response_token_ids", "sampling_logprobs", "reference_logprobs", "response_text"]

# A script holds up every other client while it runs.
CHUNK_TRAJECTORIES = 256
CHUNK_BYTES = 2 << 20
# What the script returns for a trajectory that it inserted; anything else is a duplicate.
INSERTED = 1
# Place among the script's keys, from 1, of the first source's set.
FIRST_SOURCE_KEY = 13

log = get_logger("storage-monitor")

CHECK_SECONDS = 1.0
LOG_SECONDS = 30.0


class SampledPayload(NamedTuple):
    """A serialized Trajectory, and Qhat_0 of its prompt with its standard error in reward units."""

    payload: bytes
    qhat_0: float
    error: float = 0.0

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory.FromString(self.payload)


def without_text(payload: bytes) -> bytes:
    """A serialized Trajectory without the text of its response."""
    trajectory = Trajectory.FromString(payload)
    trajectory.ClearField("response_text")
    return trajectory.SerializeToString()


def outline_of(sampled: SampledPayload) -> SampledTrajectory:
    """A sampled trajectory without what grows with its tokens, and how many these are."""
    trajectory = sampled.trajectory
    counts = Outline(prompt_tokens=len(trajectory.prompt_token_ids), response_tokens=len(trajectory.response_token_ids))
    for name in get_args(ByToken):
        trajectory.ClearField(name)
    return SampledTrajectory(trajectory=trajectory, qhat_0=sampled.qhat_0, qhat_0_error=sampled.error, outline=counts)


class PayloadCache:
    """Payloads by id, read through to Redis; a payload never changes, so what is cached stays valid."""

    def __init__(self, client: RedisClient, capacity_bytes: int) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._capacity_bytes = capacity_bytes
        self._held_bytes = 0
        self._cached: dict[tuple[str, str], bytes] = {}

    def put(self, run_id: str, trajectory_id: str, payload: bytes) -> None:
        """Cache a payload; the oldest are evicted first, as batches are sampled from the newest experience."""
        with self._lock:
            if self._cached.setdefault((run_id, trajectory_id), payload) is payload:
                self._held_bytes += len(payload)
            while self._held_bytes > self._capacity_bytes:
                self._held_bytes -= len(self._cached.pop(next(iter(self._cached))))

    def get(self, run_id: str, trajectory_ids: Sequence[str]) -> list[bytes | None]:
        """Payloads by id, None where absent."""
        cached = [self._cached.get((run_id, trajectory_id)) for trajectory_id in trajectory_ids]
        if None not in cached:
            return cached
        found = dict(zip(trajectory_ids, cached, strict=True))
        missing = [trajectory_id for trajectory_id, payload in found.items() if payload is None]
        keys = [redis_keys.replay_trajectory(run_id, trajectory_id) for trajectory_id in missing]
        for trajectory_id, payload in zip(missing, self.client.mget(keys), strict=True):
            if payload is not None:
                found[trajectory_id] = payload
                self.put(run_id, trajectory_id, payload)
        return [found[trajectory_id] for trajectory_id in trajectory_ids]


def encode_parts(batch: Sequence[SampledPayload], *, without_texts: bool) -> Iterator[bytes]:
    """Serialized SampleBatchResponses of about PART_BYTES, which together hold the batch in order."""
    if without_texts:
        batch = [each._replace(payload=without_text(each.payload)) for each in batch]
    for part in chunks_by_bytes([len(each.payload) for each in batch], PART_BYTES):
        yield encode_batch(batch[part])


def encode_outlines(batch: Sequence[SampledPayload]) -> Iterator[bytes]:
    """Like `encode_parts`, of outlines."""
    outlines = [outline_of(each) for each in batch]
    for part in chunks_by_bytes([each.ByteSize() for each in outlines], PART_BYTES):
        yield SampleBatchResponse(batch=outlines[part]).SerializeToString()


def encode_batch(batch: Iterable[SampledPayload]) -> bytes:
    """A serialized SampleBatchResponse. Raises InvalidInput when it is too large for a message."""
    parts: list[bytes] = []
    for payload, qhat_0, error in batch:
        length = _varint(len(payload))
        sample_length = len(_TRAJECTORY) + len(length) + len(payload) + _VALUE.size
        value = _VALUE.pack(_QHAT_0_TAG, qhat_0, _ERROR_TAG, error)
        parts += (_BATCH, _varint(sample_length), _TRAJECTORY, length, payload, value)
    encoded = b"".join(parts)
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise InvalidInput(
            f"the batch of {len(parts) // 6} trajectories has {len(encoded)} bytes, more than a message's"
            f" {MAX_MESSAGE_BYTES}: take a smaller trainer.batch_size, or shorter responses",
            code="batch_too_large",
        )
    return encoded


@lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; the eighth says that more follow."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


class InsertScript:
    """Inserts trajectories of one run, each at most once."""

    def __init__(self, client: RedisClient) -> None:
        self._script: RedisScript[list[int]] = client.register_script(
            (Path(__file__).parent / "lua" / "insert.lua").read_text()
        )

    def insert(
        self, run_id: str, spec: JobSpec, trajectories: Sequence[Trajectory], payloads: Sequence[bytes]
    ) -> list[int]:
        """Insert trajectories with their payloads; returns one result per trajectory, INSERTED for the new ones.

        Raises NotFound (unknown_run) when the run is deleted, and writes nothing then.
        """
        results: list[int] = []
        for chunk in chunks(payloads):
            arguments = _arguments(spec, trajectories[chunk], payloads[chunk])
            inserted = self._script(keys=_keys(run_id), args=[run_id, _lately(spec), *arguments])
            if not inserted:
                raise NotFound(f"there is no run {run_id}", code="unknown_run")
            results += inserted
        return results


def chunks(payloads: Sequence[bytes]) -> Iterator[slice]:
    """Consecutive slices, each of at most so many payloads and, unless a single one is larger, bytes."""
    start = held = 0
    for at, payload in enumerate(payloads):
        if at > start and (at - start >= CHUNK_TRAJECTORIES or held + len(payload) > CHUNK_BYTES):
            yield slice(start, at)
            start, held = at, 0
        held += len(payload)
    if payloads:
        yield slice(start, len(payloads))


def _keys(run_id: str) -> list[str]:
    return [
        redis_keys.replay_ids(run_id),
        redis_keys.replay_duplicates(run_id),
        redis_keys.replay_content(run_id),
        redis_keys.replay_facts(run_id),
        redis_keys.replay_prompts(run_id),
        redis_keys.replay_counters(run_id),
        redis_keys.replay_copies(run_id),
        redis_keys.replay_trajectory(run_id, ""),
        redis_keys.replay_unstored(),
        redis_keys.replay_untrimmed(),
        redis_keys.replay_outcomes(run_id),
        redis_keys.replay_unsolved(run_id),
        *(redis_keys.replay_source(run_id, source) for source in map(source_name, SOURCES)),
        redis_keys.run_spec(run_id),
    ]


def _arguments(spec: JobSpec, trajectories: Sequence[Trajectory], payloads: Sequence[bytes]) -> list[str | int | bytes]:
    arguments: list[str | int | bytes] = []
    for trajectory, payload in zip(trajectories, payloads, strict=True):
        arguments += [
            trajectory.trajectory_id,
            FIRST_SOURCE_KEY + SOURCES.index(trajectory.source),
            content_digest(trajectory),
            fact_of(spec, trajectory),
            payload,
            _outcome(spec, trajectory),
        ]
    return arguments


def _lately(spec: JobSpec) -> int:
    """Wrong rollouts in a row after which a prompt that was solved counts as unsolved; 0: it never does again."""
    return spec.rollout.samples_per_prompt if spec.rollout.unsolved == "lately" else 0


def _outcome(spec: JobSpec, trajectory: Trajectory) -> Literal["", "right", "wrong", "known"]:
    """What a trajectory says of its prompt, in runs that want to know."""
    if not spec.counts_outcomes:
        return ""
    right = has_succeeded(trajectory, spec.tasks.reward)
    if trajectory.source == SOURCE_ONLINE:
        return "right" if right else "wrong"
    return "known" if right and source_name(trajectory.source) in spec.replay.memory.also else ""


class StorageMonitor:
    """Checks the server every check_seconds at most; `stop_share` leaves room for what is already dispatched."""

    def __init__(self, client: RedisClient, stop_share: float, check_seconds: float = CHECK_SECONDS) -> None:
        self.client = client
        self.stop_share = stop_share
        self.check_seconds = check_seconds
        self._lock = threading.Lock()
        self._found = ""
        self._check_next = 0.0
        self._log_next = 0.0

    def pressure(self) -> str:
        """Why no more prompts should be dispatched, '' while there is room."""
        with self._lock:
            if time.monotonic() >= self._check_next:
                self._found = self._check()
                self._check_next = time.monotonic() + self.check_seconds
                if self._found and time.monotonic() >= self._log_next:
                    self._log_next = time.monotonic() + LOG_SECONDS
                    log.error("dispatching is stopped", reason=self._found)
            return self._found

    def _check(self) -> str:
        found = self.client.info("memory", "persistence")
        used, limit = found["used_memory"], found["maxmemory"]
        share = used / limit if limit else 0.0
        observability.REPLAY_MEMORY_SHARE.set(share)
        if found.get("aof_last_write_status", "ok") != "ok":
            return "Redis cannot write its append-only file: is its disk full?"
        if share >= self.stop_share:
            return f"Redis holds {used:,} of at most {limit:,} bytes (maxmemory) and evicts nothing: raise it"
        return ""


class ReplayStore:
    """All runs' experience on one Redis; safe to use from many threads and processes."""

    def __init__(self, client: RedisClient, payload_cache_bytes: int = 256 << 20) -> None:
        self.client = client
        self._specs = RunSpecs(client)
        self._cache = PayloadCache(client, payload_cache_bytes)
        self._insert = InsertScript(client)
        self._record: RedisScript[bytes] = client.register_script(
            (Path(__file__).parent / "lua" / "record_batch.lua").read_text()
        )

    def spec(self, run_id: str) -> JobSpec:
        """The run's spec. Raises NotFound for a run nobody started."""
        return self._specs.of(run_id)

    def known_prompts(self, run_id: str, prompt_ids: Sequence[str]) -> set[str] | None:
        """Those of the prompts that are problems of the run; None where its problems are not written down."""
        asked = list(dict.fromkeys(prompt_ids))
        if not asked:
            return set()
        with self.client.pipeline(transaction=False) as pipe:
            for key in (redis_keys.run_prompts(run_id), redis_keys.run_values(run_id)):
                pipe.exists(key)
                pipe.hmget(key, asked)
            stored, problems, valued, values = pipe.execute()
        if not stored and not valued:
            return None
        return {prompt for prompt, *found in zip(asked, problems, values, strict=True) if any(found)}

    def append(self, run_id: str, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
        """Check and insert trajectories; returns (inserted, duplicates).

        All or none are refused: raises InvalidInput when any is unusable, NotFound for an unknown run.
        """
        spec = self.spec(run_id)
        for trajectory in trajectories:
            check_judged(run_id, spec, trajectory)
            check_scored(spec, trajectory)
        return self.insert(run_id, trajectories)

    def insert(self, run_id: str, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
        """Insert checked trajectories, each at most once by id, offline ones also once by content.

        Returns (inserted, duplicates). Raises NotFound (unknown_run) when the run is deleted.
        """
        spec = self.spec(run_id)
        if not trajectories:
            return 0, 0
        payloads = [trajectory.SerializeToString() for trajectory in trajectories]
        try:
            results = self._insert.insert(run_id, spec, trajectories, payloads)
        except NotFound:
            self._specs.forget(run_id)
            raise
        for trajectory, payload, result in zip(trajectories, payloads, results, strict=True):
            if result == INSERTED:
                self._cache.put(run_id, trajectory.trajectory_id, payload)
        inserted = results.count(INSERTED)
        observability.REPLAY_INSERTS.labels(result="inserted").inc(inserted)
        observability.REPLAY_INSERTS.labels(result="duplicate").inc(len(results) - inserted)
        return inserted, len(results) - inserted

    def batch(self, run_id: str, step: int) -> list[str]:
        """The trajectory ids recorded for a step, [] when there are none yet."""
        return ids_of(self.client.get(redis_keys.replay_batch(run_id, step)))

    def record_batch(
        self,
        run_id: str,
        step: int,
        trajectory_ids: Sequence[str],
        counts: Mapping[SourceName, int],
        last_batch: int | None = None,
    ) -> list[str]:
        """Record a step's batch unless another request did so before; returns the ids that are recorded.

        Ids drawn from memory carry its mark.

        A batch is leased to its step, not to the process that asked for it: whoever asks again gets the same batch, and
        it counts as sampled once. Returns [], and records nothing, when `last_batch` is no longer the number of the
        last recorded batch, or when a trajectory has left Redis since it was drawn.
        """
        pairs = [part for source, count in counts.items() for part in (source, count)]
        recorded = self._record(
            keys=[
                redis_keys.replay_batch(run_id, step),
                redis_keys.replay_counters(run_id),
                redis_keys.replay_batch_log(run_id),
                *[redis_keys.replay_trajectory(run_id, without_mark(name)) for name in trajectory_ids],
            ],
            args=[" ".join(trajectory_ids), step, "" if last_batch is None else last_batch, *pairs],
        )
        return recorded.decode().split()

    def payloads(self, run_id: str, trajectory_ids: Sequence[str]) -> list[bytes | None]:
        """Serialized trajectories by id, None where absent."""
        return self._cache.get(run_id, trajectory_ids)

    def get(self, run_id: str, trajectory_ids: Sequence[str]) -> list[Trajectory | None]:
        """Trajectories by id, None where absent."""
        payloads = self.payloads(run_id, trajectory_ids)
        return [Trajectory.FromString(payload) if payload else None for payload in payloads]

    def one(self, run_id: str, trajectory_id: str) -> Trajectory:
        """A trajectory by id; a duplicate is answered by the one that stands for it. Raises NotFound."""
        stands = self.client.hget(redis_keys.replay_duplicates(run_id), trajectory_id)
        (found,) = self.get(run_id, [stands.decode() if stands else trajectory_id])
        if found is None:
            raise NotFound(f"run {run_id} has no trajectory {trajectory_id}")
        return found

    def in_redis(self, run_id: str, trajectory_ids: Sequence[str]) -> set[str]:
        """Those of these trajectories that have not left Redis."""
        facts = self.client.hmget(redis_keys.replay_facts(run_id), list(trajectory_ids)) if trajectory_ids else []
        return {trajectory_id for trajectory_id, fact in zip(trajectory_ids, facts, strict=True) if fact is not None}

    def has_trimmed(self, run_id: str) -> bool:
        """Whether trajectories of a run have left Redis."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hget(redis_keys.replay_counters(run_id), "number")
            pipe.hlen(redis_keys.replay_facts(run_id))
            number, kept = pipe.execute()
        return int(number or 0) > int(kept)

    def prompts_of(self, run_id: str, trajectory_ids: Sequence[str]) -> list[str]:
        """The prompts of acknowledged trajectories. Raises IntegrityError when one is not in the ledger."""
        facts = self.client.hmget(redis_keys.replay_facts(run_id), list(trajectory_ids))
        for trajectory_id, fact in zip(trajectory_ids, facts, strict=True):
            if fact is None:
                raise IntegrityError(f"run {run_id}: trajectory {trajectory_id} is gone from the buffer")
        return [read_fact("", fact.decode())[0].prompt_id for fact in facts if fact is not None]

    def duplicates(self, run_id: str) -> int:
        """Acknowledged offline trajectories whose content was there before."""
        return int(self.client.hlen(redis_keys.replay_duplicates(run_id)))

    def copies(self, run_id: str, trajectory_id: str) -> int:
        """Acknowledged trajectories with the same content, for which this one stands."""
        found = self.client.hget(redis_keys.replay_copies(run_id), trajectory_id)
        return int(found or 0)

    def newest_first(
        self, run_id: str, prompt_id: str, after: str, count: int, most_bytes: int = MAX_MESSAGE_BYTES
    ) -> tuple[list[Trajectory], str]:
        """A page of what is in Redis, newest first; `after` is the cursor of the page before ('' starts).

        prompt_id '' means all prompts. most_bytes: the page ends before it has more, unless one alone does.
        """
        page = self._of_prompt(run_id, prompt_id, after, count) if prompt_id else self._of_all(run_id, after, count)
        found = self.get(run_id, [trajectory_id for trajectory_id, _ in page])
        cursor = str(page[-1][1]) if len(page) == count else ""
        sizes = [trajectory.ByteSize() if trajectory is not None else 0 for trajectory in found]
        first = next(chunks_by_bytes(sizes, most_bytes), slice(0, 0))
        if first.stop < len(page):
            cursor = str(page[first.stop - 1][1])
        return [trajectory for trajectory in found[first] if trajectory is not None], cursor

    def note_policy_version(self, run_id: str, policy_version: int) -> None:
        """Store the newest version a trainer has named: the limiter does not count what is too stale for it.

        Raises NotFound (code "unknown_run") where the run is deleted.
        """
        write_of_run(
            self.client, run_id, ("HSET", redis_keys.replay_counters(run_id), "policy_version", policy_version)
        )

    def is_estimated(self, run_id: str) -> bool:
        """Whether every training prompt has its value and its offline trajectories: offline sources are complete."""
        return run_state(self.client, run_id) in ESTIMATED and not estimates_are_pending(self.client, run_id)

    def followed_run_is_exhausted(self, run_id: str, position: int) -> bool:
        """Whether the run that is followed has ended, or is deleted, and its ledger is read up to its last insertion.

        position: the last insertion number of its ledger that the follower has read.
        """
        followed = str(self.spec(run_id).rollout.follow)
        with self.client.pipeline(transaction=False) as pipe:
            pipe.get(redis_keys.run_state(followed))
            pipe.zrange(redis_keys.replay_source(followed, "online"), -1, -1, withscores=True)
            state, newest = pipe.execute()
        last = int(newest[0][1]) if newest else 0
        has_ended = state is None or decode_state(state) in TERMINAL
        return has_ended and position >= last

    def _of_all(self, run_id: str, after: str, count: int) -> list[tuple[str, int]]:
        highest = f"({int(after)}" if after else "+inf"
        # The ledger also holds ids whose trajectories have left Redis; the sources' sets do not.
        found = [
            pair
            for source in map(source_name, SOURCES)
            for pair in self.client.zrevrangebyscore(
                redis_keys.replay_source(run_id, source), highest, "-inf", start=0, num=count, withscores=True
            )
        ]
        page = sorted(found, key=lambda pair: -pair[1])[:count]
        return [(trajectory_id.decode(), int(number)) for trajectory_id, number in page]

    def _of_prompt(self, run_id: str, prompt_id: str, after: str, count: int) -> list[tuple[str, int]]:
        # ';' follows ':' and bounds the prompt's members; the number in them is padded, so bytes order as numbers.
        highest = f"({prompt_id}:{int(after):016d}:" if after else f"({prompt_id};"
        page = self.client.zrevrangebylex(
            redis_keys.replay_prompts(run_id), highest, f"[{prompt_id}:", start=0, num=count
        )
        members = (member.decode().rsplit(":", 2) for member in page)
        return [(trajectory_id, int(number)) for _, number, trajectory_id in members]
