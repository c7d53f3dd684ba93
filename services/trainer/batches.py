"""From sampled trajectories to tensors, cut over ranks and into micro-batches; what is refused on all ranks, and the
numbers of a step.

Axes: B trajectory, L padded position.

How a batch is cut: over ranks, and into micro-batches of one forward and backward each.
What bounds a micro-batch is its tokens: memory and time follow them. Every rank makes equally many passes, because a
pass ends in collectives. Where the loss compares the trajectories of a prompt, they stay together in one micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

import numpy as np
import torch

from services.trainer.ranks import Ranks
from spo.algorithm.collapse_guard import ALARMS, SAMPLER_MISMATCH, CollapseLimits, StepHealth, collapse_alarms
from spo.algorithm.objectives import Difference, TokenBatch, advantages, batch_diagnostics, effective_sample_share
from spo.algorithm.values import q_of_two_rewards
from spo.errors import IntegrityError, InvalidInput, NotReady, PreconditionFailed, SpoError
from spo.model.chat import Mask, branch_lengths, lengths_of_branches, segment_faults, trained_mask, trained_tokens
from spo.observability import TRAINER_COLLAPSE_ALARMS, get_logger
from spo.rpc.client import RpcClient
from spo.spec.job_spec import CollapseGuardSpec, JobSpec, RewardSpec, TrainerSpec
from spo.spec.reward import qhat_0_of_group
from spo.spec.section import AlgorithmSpec, wire_name
from spo.v1 import replay_service_pb2 as wire
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_SHARED, Source
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, Annotation, Trajectory

log = get_logger("batches")

# Beyond the wait for experience: for an answer, and for gigabytes of it over a slow network.
ANSWER_SECONDS = 10.0
TRANSFER_SECONDS = 600.0

T = TypeVar("T")

# Curves of parts; a scoring function may name as many as it likes.
MOST_PARTS = 32
# Curves of sources of feedback; whoever sends traffic may name as many as it likes.
MOST_SOURCES = 16


@dataclass(frozen=True)
class Outlined:
    """Of a row whose tokens are with the replay buffer: its place in the step's batch, and how many tokens it has."""

    position: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class TrainingSample:
    """One sampled trajectory; `group` numbers its prompt within the whole batch.

    qhat_0_error: the standard error of qhat_0, reward units; 0 where none is told. outlined: the tokens are not here.
    """

    trajectory: Trajectory
    qhat_0: float
    group: int
    qhat_0_error: float = 0.0
    outlined: Outlined | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.outlined.prompt_tokens if self.outlined else len(self.trajectory.prompt_token_ids)

    @property
    def response_tokens(self) -> int:
        return self.outlined.response_tokens if self.outlined else len(self.trajectory.response_token_ids)

    @property
    def branches(self) -> list[int]:
        """Tokens of each sequence that a forward sees of it."""
        return lengths_of_branches(self.trajectory.segments, self.prompt_tokens, self.response_tokens)


# Rows that stay together: a group where the loss compares its trajectories, else a single one.
Unit = list[TrainingSample]


def is_anchored(trajectory: Trajectory) -> bool:
    """Whether a version after pi0 stands for it: then its reference log-probs are that version's, as it was sampled."""
    return trajectory.anchor.policy_version > 0


@dataclass(frozen=True)
class ReplayClient:
    """The replay buffer as the trainer sees it. outlines: `whole` fetches the tokens of a batch, `sample` does not."""

    client: RpcClient
    run_id: str
    spec: JobSpec
    outlines: bool = False

    def sample(
        self, step: int, policy_version: int, wait_seconds: float, refreshed: Mapping[str, float] | None
    ) -> list[TrainingSample]:
        """The batch of a step; the same step gets the same batch. Raises NotReady when there is not enough yet.

        refreshed: Qhat_0 by prompt id under a later reference than the model folder, which then counts. A prompt that
        has none there is left out of the batch: pi0's value beside the log-probs of another reference is no residual.
        """
        request = self._request(step, policy_version, wait_seconds)
        batch = self._received(request)
        found = len(batch) + self._lost(batch)
        if found != request.batch_size:
            raise IntegrityError(f"asked for {request.batch_size} trajectories, got {found} with those that are lost")
        groups: dict[str, int] = {}
        return [
            TrainingSample(
                sampled.trajectory,
                self._qhat_0(sampled, refreshed),
                groups.setdefault(sampled.trajectory.prompt_id, len(groups)),
                # Those of later references are not told.
                sampled.qhat_0_error if refreshed is None and not sampled.trajectory.HasField("anchor") else 0.0,
                _outlined(position, sampled),
            )
            for position, sampled in enumerate(batch)
            if refreshed is None or sampled.trajectory.prompt_id in refreshed
        ]

    def _lost(self, batch: Sequence[wire.SampledTrajectory]) -> int:
        """How many samples the groups of a batch lack, where whole ones are drawn."""
        if self.spec.replay.unit != "group":
            return 0
        online = (each.trajectory for each in batch if each.trajectory.source == SOURCE_ONLINE)
        groups = Counter((each.group_id, each.group_samples) for each in online)
        # What joined a group from memory comes without its own.
        whole = [samples for (_, samples), count in groups.items() if samples == count]
        return sum(self.spec.rollout.samples_per_prompt - samples for samples in whole)

    def whole(self, rows: Iterable[TrainingSample], step: int, policy_version: int) -> dict[int, TrainingSample]:
        """Outlined rows of the step's batch with their tokens, by position.

        Raises NotReady where the batch of the step is another one by now: Redis may have lost its record.
        """
        outlined = {row.outlined.position: row for row in rows if row.outlined}
        if not outlined:
            return {}
        request = self._request(step, policy_version, 0.0)
        wanted = wire.StreamBatchRequest(batch=request, without_texts=True, positions=sorted(outlined))
        parts = self.client.stream("StreamBatch", wanted, ANSWER_SECONDS + TRANSFER_SECONDS)
        sent = [each.trajectory for part in parts for each in part.batch]
        found = dict(zip(wanted.positions, sent, strict=False))
        same = [found[at].trajectory_id == row.trajectory.trajectory_id for at, row in outlined.items() if at in found]
        if not all(same) or len(sent) != len(outlined):
            raise NotReady(f"the batch of step {step} is no longer the one that was cut over the ranks")
        return {at: replace(row, trajectory=found[at], outlined=None) for at, row in outlined.items()}

    def faults(self, rows: Sequence[TrainingSample]) -> dict[str, str]:
        """`faults` by what the job's spec needs of each trajectory."""
        cached_reference = self.spec.trainer.reference != "in_trainer"
        return faults(rows, cached_reference=cached_reference, behaviour=self.spec.algorithm.needs_behaviour)

    def _request(self, step: int, policy_version: int, wait_seconds: float) -> wire.SampleBatchRequest:
        return wire.SampleBatchRequest(
            run_id=self.run_id,
            batch_size=self.spec.trainer.batch_size,
            step=step,
            seed=self.spec.seed,
            policy_version=policy_version,
            wait_seconds=wait_seconds,
        )

    def _received(self, request: wire.SampleBatchRequest) -> list[wire.SampledTrajectory]:
        """The batch in parts, without texts; from a replay buffer of an older version as one message, if it fits.

        One that knows no outlines sends the tokens too.
        """
        wanted = wire.StreamBatchRequest(batch=request, without_texts=True, outlines=self.outlines)
        deadline_seconds = request.wait_seconds + ANSWER_SECONDS
        try:
            parts = self.client.stream("StreamBatch", wanted, deadline_seconds + TRANSFER_SECONDS)
            return [sampled for part in parts for sampled in part.batch]
        except PreconditionFailed as error:
            if error.code != "unimplemented":
                raise
        whole: wire.SampleBatchResponse = self.client.call("SampleBatch", request, deadline_seconds=deadline_seconds)
        return list(whole.batch)

    def _qhat_0(self, sampled: wire.SampledTrajectory, refreshed: Mapping[str, float] | None) -> float:
        if sampled.trajectory.HasField("anchor"):
            return qhat_0_of_group(sampled.trajectory.anchor.rewards, self.spec.algorithm)
        return sampled.qhat_0 if refreshed is None else refreshed[sampled.trajectory.prompt_id]


def _outlined(position: int, sampled: wire.SampledTrajectory) -> Outlined | None:
    if not sampled.HasField("outline"):
        return None
    return Outlined(position, sampled.outline.prompt_tokens, sampled.outline.response_tokens)


@dataclass(frozen=True)
class OwnRows:
    """A rank's minibatches with the tokens of their rows. On all ranks alike: what kept any from its rows, and faults.

    faults: trajectory id -> why no loss may be computed from it, of the whole batch.
    """

    minibatches: Sequence[Minibatch]
    problem: SpoError | None = None
    faults: dict[str, str] = field(default_factory=dict)


def fetch_own_rows(
    ranks: Ranks, replay: ReplayClient, minibatches: Sequence[Minibatch], step: int, policy_version: int
) -> OwnRows:
    """Every rank fetches the rows of its minibatches, which all ranks call together."""
    own = OwnRows(minibatches)
    try:
        passes = [each for minibatch in minibatches for each in minibatch.micro_batches]
        found = replay.whole((row for each in passes for row in each.rows), step, policy_version)
        filled = [
            replace(
                minibatch,
                micro_batches=[replace(each, rows=_filled_in(each.rows, found)) for each in minibatch.micro_batches],
            )
            for minibatch in minibatches
        ]
        own = OwnRows(filled, faults=replay.faults(list(found.values())))
    except SpoError as error:
        own = OwnRows(minibatches, error)
    everywhere = ranks.gather((own.problem, own.faults))
    problem = next((found for found, _ in everywhere if found), None)
    return OwnRows(own.minibatches, problem, {key: why for _, faulty in everywhere for key, why in faulty.items()})


def _filled_in(rows: Sequence[TrainingSample], found: Mapping[int, TrainingSample]) -> list[TrainingSample]:
    return [found[row.outlined.position] if row.outlined else row for row in rows]


def groups_of(rows: Sequence[TrainingSample]) -> list[tuple[str, str]]:
    """(run id, group id) of the online trajectories: what traces link a step to."""
    online = (row.trajectory for row in rows if row.trajectory.source == SOURCE_ONLINE)
    return [(trajectory.run_id, trajectory.group_id) for trajectory in online]


def faults(rows: Sequence[TrainingSample], *, cached_reference: bool, behaviour: bool) -> dict[str, str]:
    """Trajectory id -> why no loss may be computed from it; empty when the batch is sound.

    cached_reference: every trajectory must bring the reference's log-probs. behaviour: online and shared ones must
    bring the sampler's.
    """
    found = {
        row.trajectory.trajectory_id: _fault(row, cached_reference=cached_reference)
        or _sampling_fault(row.trajectory, wanted=behaviour)
        for row in rows
    }
    return {trajectory_id: fault for trajectory_id, fault in found.items() if fault}


def _sampling_fault(trajectory: Trajectory, *, wanted: bool) -> str:
    known, length = len(trajectory.sampling_logprobs), len(trajectory.response_token_ids)
    if known != length and (known or (wanted and trajectory.source in (SOURCE_ONLINE, SOURCE_SHARED))):
        return f"{known} sampling log-probs for {length} tokens"
    if not np.isfinite(np.array(trajectory.sampling_logprobs)).all():
        return "a sampling log-prob is not finite"
    return ""


def _fault(row: TrainingSample, *, cached_reference: bool) -> str:
    trajectory = row.trajectory
    length = len(trajectory.response_token_ids)
    if not trajectory.prompt_token_ids or not length:
        return "no prompt or no response tokens"
    if not trajectory.HasField("reward") or not math.isfinite(trajectory.reward):
        return "the reward is missing or not finite"
    if not math.isfinite(row.qhat_0):
        return "Qhat_0 is not finite"
    if not 0 <= row.qhat_0_error < math.inf:
        return "the standard error of Qhat_0 is impossible"
    misplaced = segment_faults(trajectory.segments, length, None)
    if misplaced:
        return "{} {}".format(*misplaced[0])
    trained = trained_mask(trajectory)
    if not all(_is_possible(annotation, trained) for annotation in trajectory.annotations):
        return "an annotation is impossible"
    if cached_reference and len(trajectory.reference_logprobs) != length:
        return f"{len(trajectory.reference_logprobs)} reference log-probs for {length} tokens"
    if cached_reference and not np.isfinite(np.array(trajectory.reference_logprobs)).all():
        return "a reference log-prob is not finite"
    return ""


def _is_possible(annotation: Annotation, trained_T: Mask) -> bool:
    position = annotation.position
    stands = position == 0 or (0 < position <= len(trained_T) and bool(trained_T[position - 1]))
    return stands and 0 <= annotation.successes <= annotation.rollouts > 0


def token_batch(rows: Sequence[TrainingSample], value_beta: float, reward: RewardSpec) -> TokenBatch:
    """Right-padded tensors of the rows, on the CPU; reference log-probs are 0 where a trajectory brings none.

    Of a conversation the mask holds the tokens that the policy sampled, as `spo.model.chat` says. An annotation
    speaks of the prefix of `position` tokens: its target, found with value_beta, stands at the last of them. The
    branches of an episode are one row, numbered in the attention mask: its residual is of all its actions.
    """
    shape = (len(rows), max(map(length_of, rows)))
    input_ids_BL = torch.zeros(shape, dtype=torch.long)
    attention_mask_BL = torch.zeros(shape, dtype=torch.long)
    response_mask_BL = torch.zeros(shape, dtype=torch.bool)
    reference_logprobs_BL = torch.zeros(shape)
    sampling_logprobs_BL = torch.zeros(shape)
    annotated_q_BL = torch.zeros(shape)
    annotated_mask_BL = torch.zeros(shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        trajectory = row.trajectory
        start, end = len(trajectory.prompt_token_ids), length_of(row)
        input_ids_BL[index, :start] = torch.from_numpy(np.array(trajectory.prompt_token_ids, np.int64))
        input_ids_BL[index, start:end] = torch.from_numpy(np.array(trajectory.response_token_ids, np.int64))
        lengths = branch_lengths(trajectory)
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        attention_mask_BL[index, :end] = torch.from_numpy(numbers)
        response_mask_BL[index, start:end] = torch.from_numpy(trained_mask(trajectory))
        if len(trajectory.reference_logprobs) == end - start:
            reference_logprobs_BL[index, start:end] = torch.from_numpy(
                np.array(trajectory.reference_logprobs, np.float32)
            )
        if len(trajectory.sampling_logprobs) == end - start:
            sampling_logprobs_BL[index, start:end] = torch.from_numpy(
                np.array(trajectory.sampling_logprobs, np.float32)
            )
        for position, target in annotated_targets(trajectory, value_beta, reward).items():
            annotated_q_BL[index, start + position - 1] = target
            annotated_mask_BL[index, start + position - 1] = True
    return TokenBatch(
        input_ids_BL=input_ids_BL,
        attention_mask_BL=attention_mask_BL,
        response_mask_BL=response_mask_BL,
        reference_logprobs_BL=reference_logprobs_BL,
        sampling_logprobs_BL=sampling_logprobs_BL,
        reward_B=torch.tensor([row.trajectory.reward for row in rows]),
        qhat_0_B=torch.tensor([row.qhat_0 for row in rows]),
        qhat_0_error_B=torch.tensor([row.qhat_0_error for row in rows]),
        source_B=torch.tensor([row.trajectory.source for row in rows]),
        group_B=torch.tensor([row.group for row in rows]),
        annotated_q_BL=annotated_q_BL,
        annotated_mask_BL=annotated_mask_BL,
    )


def annotated_targets(trajectory: Trajectory, value_beta: float, reward: RewardSpec) -> dict[int, float]:
    """Qhat_t by number t >= 1 of response tokens, reward units; position 0 is the prompt's own value, not a target.

    Rollouts from the same prefix are counted together.
    """
    counts: dict[int, tuple[int, int]] = {}
    for found in trajectory.annotations:
        successes, rollouts = counts.get(found.position, (0, 0))
        counts[found.position] = (successes + found.successes, rollouts + found.rollouts)
    return {
        position: q_of_two_rewards(successes / rollouts, value_beta, best=reward.best, worst=reward.shift)
        for position, (successes, rollouts) in counts.items()
        if position >= 1
    }


def length_of(row: TrainingSample) -> int:
    """Tokens of prompt and response."""
    return row.prompt_tokens + row.response_tokens


@dataclass(frozen=True)
class ForwardLimits:
    """What one forward on one rank may hold; a unit that exceeds them alone is a forward of its own.

    tokens: padding included, which there is unless `packed`; padded, each branch of an episode is a row of its own. Of
    ranks that share their rows, all theirs together.
    rows: trajectories, None: as many as fit.
    """

    tokens: int
    rows: int | None = None
    packed: bool = True

    @classmethod
    def of(cls, trainer: TrainerSpec, *, packed: bool) -> ForwardLimits:
        """A job's; packed: its model computes without padding."""
        tokens = trainer.max_tokens_per_micro_batch * trainer.sequence_parallel
        return cls(tokens, trainer.micro_batch_size, packed)

    def hold(self, rows: int, tokens: int, padded: int) -> bool:
        """Whether so many rows, of so many tokens in all or so many with padding, may be one forward."""
        return (self.rows is None or rows <= self.rows) and (tokens if self.packed else padded) <= self.tokens


@dataclass
class MicroBatch:
    """The rows of one pass, and during a step their tensors.

    An idle one, of no weight, is there only to make the ranks' passes equal in number.
    """

    rows: Sequence[TrainingSample]
    idle: bool = False
    _batch: TokenBatch | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def weight(self) -> int:
        """Trajectories of the batch that it stands for."""
        return 0 if self.idle else len(self.rows)

    def batch(self, build: Callable[[Sequence[TrainingSample]], TokenBatch]) -> TokenBatch:
        """Its tensors, which `build` makes of the rows at the first call; they stay until `release`."""
        if self._batch is None:
            self._batch = build(self.rows)
        return self._batch

    def keep(self, batch: TokenBatch) -> None:
        """Have `batch` as its tensors from now on."""
        self._batch = batch

    def release(self) -> None:
        """Forget the tensors: the step is over."""
        self._batch = None


@dataclass(frozen=True)
class Minibatch:
    """What one rank gets of the trajectories of an optimiser step; size counts them over all ranks."""

    micro_batches: Sequence[MicroBatch]
    size: int


def shares_of_ranks(
    rows: Sequence[TrainingSample], spec: JobSpec, world_size: int, limits: ForwardLimits
) -> list[list[Minibatch]]:
    """Each rank's minibatches of a job's batch; ranks that compute their rows together get the same ones."""
    width, whole_groups = spec.trainer.sequence_parallel, spec.algorithm.needs_groups
    minibatches = spec.trainer.minibatches
    shares = cut_into_minibatches(rows, minibatches, world_size // width, limits, whole_groups=whole_groups)
    return [share for share in shares for _ in range(width)]


def cut_into_minibatches(
    rows: Sequence[TrainingSample], count: int, world_size: int, limits: ForwardLimits, *, whole_groups: bool
) -> list[list[Minibatch]]:
    """Each rank's minibatches, of similar length and equal size (nearly so with `whole_groups`), cut by `cut`.

    Fewer than `count` where there are fewer groups.
    """
    shares: list[list[Minibatch]] = [[] for _ in range(world_size)]
    for units in _balanced(_units(rows, whole_groups=whole_groups), count):
        part = _rows(units)
        if not part:
            continue
        for share, micro_batches in zip(shares, cut(part, world_size, limits, whole_groups=whole_groups), strict=True):
            share.append(Minibatch(micro_batches, len(part)))
    return shares


def cut(
    rows: Sequence[TrainingSample], world_size: int, limits: ForwardLimits, *, whole_groups: bool
) -> list[list[MicroBatch]]:
    """Each rank's micro-batches, as many on every rank, of trajectories of similar length.

    Ranks get equally many trajectories (nearly so with `whole_groups`) of similar total length.
    """
    if not rows:
        return [[] for _ in range(world_size)]
    units = _units(rows, whole_groups=whole_groups)
    shares = [_gathered(share, limits) for share in _balanced(units, world_size)]
    passes = max(map(len, shares))
    smallest = min(units, key=_tokens)
    return [_filled(share, passes, smallest) for share in shares]


def _units(rows: Sequence[TrainingSample], *, whole_groups: bool) -> list[Unit]:
    if not whole_groups:
        return [[row] for row in rows]
    groups: dict[int, Unit] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def _balanced(units: Sequence[Unit], shares: int) -> list[list[Unit]]:
    """Units go, the largest first, to the share that has the fewest rows so far, and of those the fewest tokens."""
    found: list[list[Unit]] = [[] for _ in range(shares)]
    loads = [(0, 0)] * shares
    for unit in sorted(units, key=lambda unit: (-len(unit), -_tokens(unit))):
        share = loads.index(min(loads))
        found[share].append(unit)
        loads[share] = (loads[share][0] + len(unit), loads[share][1] + _tokens(unit))
    return found


def _gathered(units: Sequence[Unit], limits: ForwardLimits) -> list[list[Unit]]:
    """Units of similar length together, as many in a forward as the limits allow."""
    forwards: list[list[Unit]] = []
    rows = tokens = branches = 0
    for unit in sorted(units, key=_longest):
        own = len(unit), _tokens(unit), sum(len(row.branches) for row in unit)
        rows, tokens, branches = rows + own[0], tokens + own[1], branches + own[2]
        if forwards and limits.hold(rows, tokens, branches * _longest(unit)):
            forwards[-1].append(unit)
        else:
            forwards.append([unit])
            rows, tokens, branches = own
    return forwards


def _filled(forwards: list[list[Unit]], passes: int, spare: Unit) -> list[MicroBatch]:
    """Exactly `passes` micro-batches: forwards of several units are halved, then idle ones are added."""
    while len(forwards) < passes and any(len(units) > 1 for units in forwards):
        largest = max(range(len(forwards)), key=lambda index: len(forwards[index]))
        half = len(forwards[largest]) // 2
        forwards[largest : largest + 1] = [forwards[largest][:half], forwards[largest][half:]]
    micro_batches = [MicroBatch(_rows(units)) for units in forwards]
    return micro_batches + [MicroBatch(spare, idle=True)] * (passes - len(micro_batches))


def _rows(units: Sequence[Unit]) -> list[TrainingSample]:
    return [row for unit in units for row in unit]


def _tokens(unit: Unit) -> int:
    return sum(map(length_of, unit))


def _longest(unit: Unit) -> int:
    """Tokens of the longest sequence that a forward sees."""
    return max(max(row.branches) for row in unit)


class UnusableBatch(Exception):
    """Why nothing can be learned from the batch, the same on every rank; `first` is the first of its faults."""

    def __init__(self, faults: Sequence[tuple[str, InvalidInput]]) -> None:
        super().__init__("; ".join(message for message, _ in faults))
        self.first = faults[0][1]


def on_each(ranks: Ranks, micro_batches: Sequence[MicroBatch], compute: Callable[[MicroBatch], T]) -> list[T]:
    """The results of `compute` on this rank's micro-batches. Every rank calls this alike.

    A fault in one does not keep the others from being computed: forwards gather parameters from all ranks. Raises
    UnusableBatch on every rank when `compute` raises InvalidInput on any.
    """
    results: list[T] = []
    faults: list[tuple[str, InvalidInput]] = []
    for micro_batch in micro_batches:
        try:
            results.append(compute(micro_batch))
        except InvalidInput as error:
            faults.append((_naming_trajectories(error, micro_batch), error))
    everywhere = [fault for found in ranks.gather(faults) for fault in found]
    if everywhere:
        raise UnusableBatch(everywhere)
    return results


def _naming_trajectories(error: InvalidInput, micro_batch: MicroBatch) -> str:
    """The error in words, with the ids of the trajectories that its pointers (/tensor/row) mean."""
    rows = [violation.pointer.rpartition("/")[2] for violation in error.violations]
    ids = {micro_batch.rows[int(row)].trajectory.trajectory_id for row in rows if row.isdigit()}
    return f"{error.message} ({', '.join(sorted(ids))})" if ids else str(error)


class WeightedMeans:
    """Weighted means of named values; the weight is a number of trajectories. Mergeable over ranks.

    log_weights: ln pi_theta / pi_sampler of the responses whose sampler is known, as they were met.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.weights: dict[str, float] = defaultdict(float)
        self.log_weights: list[float] = []

    def add(self, values: Mapping[str, float], weight: float) -> None:
        if weight:
            for name, value in values.items():
                self.sums[name] += value * weight
                self.weights[name] += weight

    def add_by_source(self, said_by: Sequence[str], residuals_abs: Sequence[float]) -> None:
        """`residual_abs/<source>` of the trajectories whose reward a source said, MOST_SOURCES sources at most."""
        named: dict[str, list[float]] = defaultdict(list)
        for source, residual in zip(said_by, residuals_abs, strict=True):
            if source:
                named[source].append(residual)
        for source in sorted(named)[:MOST_SOURCES]:
            found = named[source]
            self.add({f"residual_abs/{source}": sum(found) / len(found)}, len(found))

    def means(self, others: Iterable[WeightedMeans]) -> dict[str, float]:
        """The means over all of `others` (which include this one)."""
        merged = WeightedMeans()
        for other in others:
            for name, weight in other.weights.items():
                merged.add({name: other.sums[name] / weight}, weight)
        return {name: merged.sums[name] / weight for name, weight in merged.weights.items()}


def batch_metrics(rows: Sequence[TrainingSample], policy_version: int) -> dict[str, float]:
    """Metrics of a batch before it is learned from: mean reward, in all and by source, and the count of trained tokens.

    Of verdicts with a score its mean, `score`, and those of its parts, `score/<name>`, at most MOST_PARTS names. Of
    online trajectories also the staleness in versions, the length in tokens and the share cut off at the limit.
    """
    means = WeightedMeans()
    named: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        trajectory = row.trajectory
        source = wire_name(Source, trajectory.source)
        means.add({"reward": trajectory.reward, f"reward/{source}": trajectory.reward}, 1)
        verdict = trajectory.verdict
        if verdict.HasField("score"):
            means.add({"score": verdict.score}, 1)
        for part in verdict.parts:
            named[f"score/{part.name}"].append(part.score)
        if trajectory.source == SOURCE_ONLINE:
            of_online = {
                "staleness": policy_version - trajectory.policy_version_last,
                "response_length/online": trained_tokens(trajectory, row.response_tokens),
                "truncated/online": float(trajectory.finish_reason == FINISH_REASON_LENGTH),
            }
            means.add(of_online, 1)
    for name in sorted(named)[:MOST_PARTS]:
        means.add({name: sum(named[name]) / len(named[name])}, len(named[name]))
    return {
        **means.means([means]),
        "tokens": float(sum(trained_tokens(row.trajectory, row.response_tokens) for row in rows)),
        "trajectories": float(len(rows)),
    }


def named_diagnostics(diagnostics: dict[str, float]) -> dict[str, float]:
    """The diagnostics under the names of the curves; the reward is counted from the whole batch already."""
    renamed = {
        "kl_to_reference_nats": "kl_to_reference",
        "log_ratio_nats": "log_ratio",
        "log_ratio_per_token_nats": "log_ratio_per_token",
        "response_tokens": "response_length",
    }
    return {renamed.get(name, name): value for name, value in diagnostics.items() if name != "reward"}


def policy_metrics(logprobs_BL: torch.Tensor, batch: TokenBatch, algorithm: AlgorithmSpec) -> dict[str, float]:
    """The diagnostics of a micro-batch, and of a job that learns from preferences also how well it tells them apart.

    preference_margin: the mean over pairs of a prompt with r_w > r_l of h_w - h_l, h = beta ln pi / pi0 of a response,
    in reward units; preference_accuracy: the share of pairs whose margin is above 0. A batch without a pair has none.
    """
    found = named_diagnostics(batch_diagnostics(logprobs_BL, batch, algorithm.beta))
    if not any(term.needs("pairs") for term in algorithm.losses):
        return found
    h_B = advantages(logprobs_BL, batch, algorithm.beta).sum(dim=1)
    better_BB = batch.reward_B[:, None] > batch.reward_B[None, :]
    margins_P = (h_B[:, None] - h_B[None, :])[better_BB & (batch.group_B[:, None] == batch.group_B[None, :])]
    if not len(margins_P):
        return found
    accuracy = (margins_P > 0).double().mean()
    return found | {"preference_margin": margins_P.mean().item(), "preference_accuracy": accuracy.item()}


def weight_metrics(log_weights: Sequence[float]) -> dict[str, float]:
    """How far the policy is from the samplers of the responses, in nats of whole ones (k2); the effective samples."""
    if not log_weights:
        return {}
    return {
        "kl_to_sampler": 0.5 * sum(weight * weight for weight in log_weights) / len(log_weights),
        "effective_sample_share": effective_sample_share(log_weights),
    }


def sampler_metrics(differences: Sequence[Difference]) -> dict[str, float]:
    """How the sampler's log-probs differ from the trainer's, nats; `excess` above 1 is more than rounding."""
    if not differences:
        return {}
    worst = max(differences, key=lambda difference: float(difference.excess_B.max()))
    return {
        f"{SAMPLER_MISMATCH}/token": max(difference.largest_token for difference in differences),
        f"{SAMPLER_MISMATCH}/sum": worst.largest_sum,
        f"{SAMPLER_MISMATCH}/tolerance": worst.tolerance,
        f"{SAMPLER_MISMATCH}/excess": float(worst.excess_B.max()),
    }


def sampler_alarm(metrics: Mapping[str, float]) -> dict[str, str]:
    """The alarm by its name, in words, where `sampler_metrics` are beyond rounding."""
    if metrics.get(f"{SAMPLER_MISMATCH}/excess", 0.0) <= 1:
        return {}
    token, total, tolerance = (metrics[f"{SAMPLER_MISMATCH}/{name}"] for name in ("token", "sum", "tolerance"))
    return {
        SAMPLER_MISMATCH: f"the sampler's log-probs differ from the trainer's by up to {token:.3g} nats at a token and "
        f"{total:.3g} in the sum over a response, where rounding explains {tolerance:.3g}"
    }


class CollapseMonitor:
    """Reports an alarm once, when it begins to sound.

    Only online trajectories are judged, since they show what the policy writes now; a high log-ratio on people's
    solutions only means that it learns from them. Response lengths are compared with those of the first `window` steps
    of this process.
    """

    def __init__(self, spec: CollapseGuardSpec) -> None:
        self.pauses = spec.policy == "pause"
        self._on = spec.policy != "off"
        self._limits = CollapseLimits(**spec.model_dump(exclude={"policy"}))
        self._history: deque[StepHealth] = deque(maxlen=2 * spec.window)
        self._first_lengths: list[float] = []
        self._sounding: frozenset[str] = frozenset()
        # From 0 on: of a count that appears with the first alarm nobody sees an increase.
        for name in ALARMS:
            TRAINER_COLLAPSE_ALARMS.labels(alarm=name)

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """Alarms that began to sound with this step, by name with the reason in words."""
        if not self._on:
            return {}
        health = _health(metrics)
        self._history.append(health)
        if len(self._first_lengths) < self._limits.window and math.isfinite(health.response_tokens):
            self._first_lengths.append(health.response_tokens)
        usual = fmean(self._first_lengths) if self._first_lengths else math.nan
        found = collapse_alarms(list(self._history), usual, self._limits)
        new = {name: reason for name, reason in found.items() if name not in self._sounding}
        self._sounding = frozenset(found)
        for name, reason in new.items():
            log.warning("collapse alarm", alarm=name, step=step, reason=reason)
            TRAINER_COLLAPSE_ALARMS.labels(alarm=name).inc()
        return new

    def rearm(self) -> None:
        """Forget the recent steps: a person has resumed the run, and the alarms may sound again."""
        self._history.clear()
        self._sounding = frozenset()


def _health(metrics: Mapping[str, float]) -> StepHealth:
    """Metrics that a step lacks are nan, which sounds no alarm."""
    return StepHealth(
        log_ratio_nats=metrics.get("log_ratio/online", math.nan),
        grad_norm=metrics.get("grad_norm", math.nan),
        response_tokens=metrics.get("response_length/online", math.nan),
        truncated_share=metrics.get("truncated/online", math.nan),
        reward=metrics.get("reward/online", math.nan),
        loss=metrics.get("loss", math.nan),
    )
