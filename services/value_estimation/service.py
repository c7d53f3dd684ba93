"""gRPC face of value-estimation: decode, call, encode."""

from __future__ import annotations

from typing import Any

import redis

from services.value_estimation.reference import References
from spo import redis_keys
from spo.v1 import value_service_pb2 as value
from spo.v1.value_pb2 import PromptValue
from spo.v1.value_service_pb2_grpc import ValueServiceServicer


class ValueService(ValueServiceServicer):
    """Reference log-probs and prompt values."""

    def __init__(self, client: redis.Redis, references: References) -> None:
        self.client = client
        self.references = references

    def ComputeReferenceLogprobs(
        self, request: value.ComputeReferenceLogprobsRequest, context: Any
    ) -> value.ComputeReferenceLogprobsResponse:
        reference = self.references.of(request.run_id)
        scored = reference.logprobs(
            [each.prompt_token_ids for each in request.sequences],
            [each.response_token_ids for each in request.sequences],
        )
        return value.ComputeReferenceLogprobsResponse(
            sequences=[value.TokenLogprobs(logprobs=logprobs) for logprobs in scored],
            reference_hash=reference.model_hash,
        )

    def GetPromptValues(self, request: value.GetPromptValuesRequest, context: Any) -> value.GetPromptValuesResponse:
        key = redis_keys.run_values(request.run_id)
        asked = list(request.prompt_ids)
        stored: Any = self.client.hmget(key, asked) if asked else self.client.hvals(key)
        found = [PromptValue.FromString(payload) for payload in stored if payload]
        return value.GetPromptValuesResponse(values=found)
