"""gRPC service of value-estimation: values of prompts on demand, and the policy as value:
Q_t and A_t for every token of stored trajectories, and how well Q_t predicts pi0.

Q_t = Qhat_0 + sum over s <= t of A_s,    A_s = beta (ln pi(a_s) - ln pi0(a_s))        (Eq. 11, 12)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import grpc

from services.value_estimation.reference import Policies, References
from services.value_estimation.samples import SampleMaker, ServiceClients
from spo import redis_keys
from spo.algorithm.values import CalibrationCurve, calibration, success_probability
from spo.errors import InvalidInput, NotFound, PreconditionFailed
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import run_state
from spo.model.chat import trained_mask, trained_tokens
from spo.rpc.client import Parts
from spo.spec.job_spec import JobSpec, ValueSpec
from spo.spec.reward import has_succeeded, qhat_0, qhat_0_of_group
from spo.spec.section import ESTIMATED, JobState
from spo.v1 import value_service_pb2 as value
from spo.v1.prompt_pb2 import Prompt, Sampling
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.value_service_pb2_grpc import ValueServiceServicer


@dataclass(frozen=True)
class Valued:
    """One trajectory with Qhat_0 of its prompt and, per response token, A_t and Q_t; reward units.

    At what an environment said, A_t is 0 and Q_t what it was before.
    """

    trajectory: Trajectory
    qhat_0: float
    advantages: list[float]
    q: list[float]

    def q_after(self, position: int) -> float:
        """Q of the prefix of that many response tokens."""
        return self.q[position - 1] if position else self.qhat_0


@dataclass(frozen=True)
class CalibrationReport:
    """Calibration of the policy's Q_t, and of Qhat_0 used for every prefix, which the policy must beat."""

    of_q: CalibrationCurve
    of_qhat_0: CalibrationCurve
    prefixes: int


@dataclass(frozen=True)
class CalibrationDesign:
    """How many samples of pi0 are used, how many prefixes of each sample, and of which prompts (none: of all).

    A sample of pi0 is itself one continuation of each of its prefixes, so it costs nothing more; but the policy has
    been trained on some of them. With `continuations` > 0 pi0 samples that many fresh ones per prefix, which needs
    `prompts`.
    """

    trajectories: int = 256
    positions: int = 4
    continuations: int = 0
    bins: int = 10
    prompts: tuple[Prompt, ...] = ()

    def __post_init__(self) -> None:
        if min(self.trajectories, self.positions, self.bins) < 1 or self.continuations < 0:
            raise InvalidInput("calibration needs one or more prefixes, trajectories and bins")
        if self.continuations and not self.prompts:
            raise InvalidInput("fresh continuations need the prompts")


@dataclass
class TokenValuer:
    """Values trajectories of any run under any of its weight versions."""

    client: RedisClient
    policies: Policies
    clients: ServiceClients

    def values_of(self, run_id: str, version: int, trajectory_ids: Sequence[str]) -> list[Valued]:
        """Q_t and A_t of stored trajectories. Raises NotFound."""
        return self.values(run_id, version, [self.clients.trajectory(run_id, name) for name in trajectory_ids])

    def values(self, run_id: str, version: int, trajectories: Sequence[Trajectory]) -> list[Valued]:
        """Q_t and A_t of trajectories. Raises NotFound when a prompt has no value or the version is gone."""
        spec = self.policies.references.spec(run_id)
        policy, reference = self.policies.of(run_id, version), self.policies.references.of(run_id)
        prompts = [trajectory.prompt_token_ids for trajectory in trajectories]
        responses = [trajectory.response_token_ids for trajectory in trajectories]
        segments = [trajectory.segments for trajectory in trajectories]
        policy_logprobs = policy.logprobs(prompts, responses, segments)
        # Those of version 0 too: the same forward for both, or Q_T would carry the difference.
        stored = [list(trajectory.reference_logprobs) for trajectory in trajectories]
        # Nobody but the sampler has those of a later anchor; read back from the experience store they are of nobody.
        anchored = [trajectory.anchor.policy_version > 0 for trajectory in trajectories]
        is_scored = all(
            len(each.reference_logprobs) == len(each.response_token_ids) and (each.reference_hash or own)
            for each, own in zip(trajectories, anchored, strict=True)
        )
        reference_logprobs = stored if is_scored else reference.logprobs(prompts, responses, segments)
        reference_logprobs = [
            own if keeps else of_pi0 for keeps, own, of_pi0 in zip(anchored, stored, reference_logprobs, strict=True)
        ]
        start = self._starts(run_id, spec, trajectories)
        found = []
        for trajectory, ours, theirs in zip(trajectories, policy_logprobs, reference_logprobs, strict=True):
            beta = beta_of(trajectory, spec)
            advantages = [beta * (mine - other) for mine, other in zip(ours, theirs, strict=True)]
            q = list(accumulate(advantages, initial=start[trajectory.trajectory_id]))
            found.append(Valued(trajectory, q[0], advantages, q[1:]))
        return found

    def calibrate(
        self, run_id: str, version: int, design: CalibrationDesign, wanted: Callable[[], bool]
    ) -> CalibrationReport:
        """How well success_probability(Q_t) predicts pi0 going on from prefixes of its own samples.

        Raises PreconditionFailed when the run keeps no samples of pi0, or when fresh continuations are asked of
        conversations, NotReady when they do not come.
        """
        spec = self.policies.references.spec(run_id)
        if design.continuations and not wanted():
            raise PreconditionFailed(
                f"run {run_id} has ended: no engine serves it, so pi0 gives no fresh continuations", code="run_ended"
            )
        conversations = sorted({prompt.environment for prompt in design.prompts if prompt.environment})
        if design.continuations and conversations:
            raise PreconditionFailed(
                f"pi0 gives no fresh continuations of conversations with {', '.join(conversations)}",
                code="prefix_of_conversation",
            )
        samples = self._samples(run_id, design)
        repeats = self._repeats(run_id)
        clients = replace(self.clients, wanted=wanted)
        maker = SampleMaker(run_id, self.policies.references.of(run_id), clients, spec.tasks.reward)
        prefixes = [
            (valued, position)
            for valued in self.values(run_id, version, samples)
            for position in _positions(valued.trajectory, design.positions)
        ]

        def outcomes_of(prefix: tuple[Valued, int]) -> list[bool]:
            valued, position = prefix
            if design.continuations:
                return _continue(maker, spec, valued.trajectory, position, design)
            success = has_succeeded(valued.trajectory, spec.tasks.reward)
            return [success] * (1 + repeats[valued.trajectory.trajectory_id])

        with ThreadPoolExecutor(self.clients.settings.prompts_in_flight, thread_name_prefix="calibration") as pool:
            outcomes = list(pool.map(outcomes_of, prefixes))

        def probabilities(q_of: Callable[[Valued, int], float]) -> list[float]:
            reward, beta = spec.tasks.reward, spec.algorithm.temperature_of_values
            return [
                success_probability(q_of(valued, position), beta, best=reward.best, worst=reward.shift)
                for (valued, position), found in zip(prefixes, outcomes, strict=True)
                for _ in found
            ]

        flat = list(chain.from_iterable(outcomes))
        return CalibrationReport(
            calibration(probabilities(Valued.q_after), flat, design.bins),
            calibration(probabilities(lambda valued, _: valued.qhat_0), flat, design.bins),
            len(prefixes),
        )

    def _starts(self, run_id: str, spec: JobSpec, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Qhat_0 by trajectory id: its anchor's where it has one of its own, else its prompt's."""
        of_prompts = self._of_prompts(run_id, spec, {each.prompt_id for each in trajectories if not has_own(each)})
        return {
            each.trajectory_id: qhat_0_of_group(each.anchor.rewards, spec.algorithm)
            if has_own(each)
            else of_prompts[each.prompt_id]
            for each in trajectories
        }

    def _of_prompts(self, run_id: str, spec: JobSpec, prompt_ids: set[str]) -> dict[str, float]:
        """Qhat_0 by prompt; 0 where the job estimates none."""
        if spec.value is None or not prompt_ids:
            return dict.fromkeys(prompt_ids, 0.0)
        asked = sorted(prompt_ids)
        stored = self.client.hmget(redis_keys.run_values(run_id), asked)
        found = {}
        for prompt_id, payload in zip(asked, stored, strict=True):
            estimate = qhat_0(PromptValue.FromString(payload), spec) if payload else None
            if estimate is None:
                raise NotFound(f"run {run_id} has no value for prompt {prompt_id}", code="no_value")
            found[prompt_id] = estimate.q
        return found

    def _samples(self, run_id: str, design: CalibrationDesign) -> list[Trajectory]:
        """At most design.trajectories samples of pi0, of as many prompts as possible."""
        stored = self.client.hkeys(redis_keys.run_values(run_id))
        known = sorted(name.decode() for name in stored)
        named = {prompt.prompt_id for prompt in design.prompts}
        prompt_ids = [prompt_id for prompt_id in known if not named or prompt_id in named][: design.trajectories]
        per_prompt = -(-design.trajectories // max(1, len(prompt_ids)))
        found: list[Trajectory] = []
        for prompt_id in prompt_ids:
            found += self.clients.some_samples(run_id, prompt_id, per_prompt)
        if not found:
            raise PreconditionFailed(f"run {run_id} keeps no samples of pi0 to be measured by", code="no_samples")
        return found[: design.trajectories]

    def _repeats(self, run_id: str) -> Counter[str]:
        """How often pi0 has sampled the content of a stored trajectory again: equal ones are stored once."""
        stored = self.client.hvals(redis_keys.replay_duplicates(run_id))
        return Counter(name.decode() for name in stored)


def has_own(trajectory: Trajectory) -> bool:
    """Whether the group that it was sampled with gives its value."""
    return trajectory.HasField("anchor")


def beta_of(trajectory: Trajectory, spec: JobSpec) -> float:
    """The temperature of a trajectory's log-ratio, reward units: the job's, or that divided by its sampled tokens."""
    per_token = spec.algorithm.beta_per == "token"
    return spec.algorithm.beta / (max(1, trained_tokens(trajectory)) if per_token else 1)


def _positions(trajectory: Trajectory, count: int) -> list[int]:
    """Prefix lengths spread evenly over the tokens that the policy sampled, the empty prefix first."""
    sampled = [0, *(int(index) + 1 for index in trained_mask(trajectory).nonzero()[0])]
    return [sampled[place] for place in sorted({(len(sampled) - 1) * number // count for number in range(count)})]


def _continue(
    maker: SampleMaker, spec: JobSpec, trajectory: Trajectory, position: int, design: CalibrationDesign
) -> list[bool]:
    """Whether fresh continuations of pi0 from a prefix succeed; they are not stored."""
    prompt = next(prompt for prompt in design.prompts if prompt.prompt_id == trajectory.prompt_id)
    value = spec.value or ValueSpec()
    name = f"calibration-{redis_keys.digest(trajectory.trajectory_id, str(position))[:16]}"
    sampling = Sampling(
        samples=design.continuations,
        temperature_min=value.temperature,
        temperature_max=value.temperature,
        top_p=value.top_p,
        max_tokens=spec.model.max_response_tokens,
        seed=int(redis_keys.digest("calibration", name)[:15], 16),
    )
    found = maker.sample_reference(prompt, sampling, name, prefix=trajectory.response_token_ids[:position])
    return [has_succeeded(continuation, spec.tasks.reward) for continuation in found]


# States of runs that inference replicas serve.
SERVED = ESTIMATED | {JobState.ESTIMATING}


class ValueService(ValueServiceServicer):
    """Reference log-probs, prompt values, and the policy as value."""

    def __init__(self, client: RedisClient, references: References, valuer: TokenValuer) -> None:
        self.client = client
        self.references = references
        self.valuer = valuer

    def ComputeReferenceLogprobs(
        self, request: value.ComputeReferenceLogprobsRequest, context: grpc.ServicerContext
    ) -> value.ComputeReferenceLogprobsResponse:
        reference = self.references.of(request.run_id)
        scored = reference.logprobs(
            [sequence.prompt_token_ids for sequence in request.sequences],
            [sequence.response_token_ids for sequence in request.sequences],
            [sequence.segments for sequence in request.sequences],
        )
        return value.ComputeReferenceLogprobsResponse(
            sequences=[value.TokenLogprobs(logprobs=logprobs) for logprobs in scored],
            reference_hash=reference.model_hash,
        )

    def ReferenceLogprobsParts(
        self, request: value.ComputeReferenceLogprobsRequest, context: grpc.ServicerContext
    ) -> Iterator[value.ReferenceLogprobsPart]:
        """What each forward has found, of sequences of any number and length; the next is begun for a caller alone."""
        parts: Parts[value.ReferenceLogprobsPart] = Parts(context)

        def work() -> None:
            try:
                reference = self.references.of(request.run_id)
                for by_place in reference.scored(
                    [sequence.prompt_token_ids for sequence in request.sequences],
                    [sequence.response_token_ids for sequence in request.sequences],
                    [sequence.segments for sequence in request.sequences],
                    lambda: parts.is_wanted,
                ):
                    scored = [value.ScoredSequence(index=place, logprobs=found) for place, found in by_place.items()]
                    parts.put(value.ReferenceLogprobsPart(scored=scored, reference_hash=reference.model_hash))
                parts.end()
            except BaseException as error:
                parts.end(error)

        def beat() -> value.ReferenceLogprobsPart:
            return value.ReferenceLogprobsPart(waits_for="a forward, or the model's turn")

        threading.Thread(target=work, name="logprobs", daemon=True).start()
        return parts.sent(beat)

    def GetPromptValues(
        self, request: value.GetPromptValuesRequest, context: grpc.ServicerContext
    ) -> value.GetPromptValuesResponse:
        key = redis_keys.run_values(request.run_id)
        asked = list(request.prompt_ids)
        stored = self.client.hmget(key, asked) if asked else self.client.hvals(key)
        found = [PromptValue.FromString(payload) for payload in stored if payload]
        spec = self.references.spec(request.run_id)
        beta = request.beta if request.HasField("beta") else None
        derived = [(known.prompt_id, qhat_0(known, spec, beta)) for known in found]
        estimates = [
            value.PromptEstimate(prompt_id=prompt_id, q=estimate.q, low=estimate.low, high=estimate.high)
            for prompt_id, estimate in derived
            if estimate
        ]
        return value.GetPromptValuesResponse(values=found, estimates=estimates)

    def GetTokenValues(
        self, request: value.GetTokenValuesRequest, context: grpc.ServicerContext
    ) -> value.GetTokenValuesResponse:
        version = self._version(request)
        found = self.valuer.values_of(request.run_id, version, request.trajectory_ids)
        return value.GetTokenValuesResponse(
            policy_version=version,
            trajectories=[
                value.TokenValues(
                    trajectory_id=valued.trajectory.trajectory_id,
                    qhat_0=valued.qhat_0,
                    q=valued.q,
                    advantages=valued.advantages,
                    tokens=self.references.of(request.run_id).pieces(valued.trajectory.response_token_ids),
                )
                for valued in found
            ],
        )

    def GetCalibration(
        self, request: value.GetCalibrationRequest, context: grpc.ServicerContext
    ) -> value.GetCalibrationResponse:
        version = self._version(request)
        design = CalibrationDesign(
            trajectories=request.trajectories or 256,
            positions=request.positions or 4,
            continuations=request.continuations,
            bins=request.bins or 10,
            prompts=tuple(request.prompts),
        )

        def wanted() -> bool:
            return bool(context.is_active()) and run_state(self.client, request.run_id) in SERVED

        return _report(version, self.valuer.calibrate(request.run_id, version, design, wanted))

    def _version(self, request: value.GetTokenValuesRequest | value.GetCalibrationRequest) -> int:
        if request.HasField("policy_version"):
            return request.policy_version
        return self.valuer.policies.newest(request.run_id)


def _report(version: int, found: CalibrationReport) -> value.GetCalibrationResponse:
    return value.GetCalibrationResponse(
        policy_version=version,
        bins=[value.CalibrationBin(**vars(curve_bin)) for curve_bin in found.of_q.bins],
        expected_calibration_error=found.of_q.expected_error,
        brier_score=found.of_q.brier,
        brier_score_of_qhat_0=found.of_qhat_0.brier,
        prefixes=found.prefixes,
    )
