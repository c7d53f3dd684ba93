"""gRPC service of value-estimation: decode, call, encode."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from services.value_estimation.reference import References
from services.value_estimation.token_values import CalibrationDesign, CalibrationReport, TokenValuer
from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import run_state
from spo.rpc.long_calls import Parts
from spo.spec.reward import qhat_0
from spo.spec.section import ESTIMATED, JobState
from spo.v1 import value_service_pb2 as value
from spo.v1.value_pb2 import PromptValue
from spo.v1.value_service_pb2_grpc import ValueServiceServicer

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
