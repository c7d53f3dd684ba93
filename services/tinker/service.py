"""gRPC service of the Tinker API: says whose everything is before anything is queued; put together with its worker."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from services.tinker.sessions import AdapterCheckpoint, CheckpointStore, Operations, Sessions
from services.tinker.settings import Settings
from services.tinker.shared_model import LOSSES, LoraShape, SharedModel
from services.tinker.worker import TinkerWorker
from spo.errors import InvalidInput
from spo.v1 import tinker_service_pb2 as tinker
from spo.v1.tinker_service_pb2_grpc import TinkerServiceServicer

# Of results in one answer; the rest comes with the next.
MOST_BYTES = 16 << 20
Named = tuple[str, str, str]


class TinkerService(TinkerServiceServicer):
    def __init__(
        self, settings: Settings, model: SharedModel, sessions: Sessions, operations: Operations, store: CheckpointStore
    ) -> None:
        self.settings = settings
        self.model = model
        self.sessions = sessions
        self.operations = operations
        self.store = store
        self.name = settings.model_name or str(model.path)

    def DescribeTinker(
        self, request: tinker.DescribeTinkerRequest, context: grpc.ServicerContext
    ) -> tinker.DescribeTinkerResponse:
        """The base model and what may be asked of it."""
        return tinker.DescribeTinkerResponse(
            base_model=self.name,
            tokenizer=self.settings.tokenizer or str(self.model.path),
            max_context_tokens=self.model.max_tokens,
            losses=list(LOSSES),
        )

    def OpenTinkerSession(
        self, request: tinker.OpenTinkerSessionRequest, context: grpc.ServicerContext
    ) -> tinker.OpenTinkerSessionResponse:
        """For one client process."""
        return tinker.OpenTinkerSessionResponse(session_id=self.sessions.open(request.tenant))

    def BeatTinkerSession(
        self, request: tinker.BeatTinkerSessionRequest, context: grpc.ServicerContext
    ) -> tinker.BeatTinkerSessionResponse:
        """It is alive, or done."""
        self.sessions.beat(request.tenant, request.session_id, finish=request.finish)
        return tinker.BeatTinkerSessionResponse()

    def SubmitTinker(
        self, request: tinker.SubmitTinkerRequest, context: grpc.ServicerContext
    ) -> tinker.SubmitTinkerResponse:
        """Queue an operation of a session, model or sampler of the tenant's own."""
        kind = request.WhichOneof("operation")
        naming: dict[str | None, Callable[[tinker.SubmitTinkerRequest], Named]] = {
            "create_model": self._creation,
            "load_weights": self._loading,
            "sample": self._sampling,
            "forward_backward": self._training,
            "optim_step": self._training,
            "save_weights": self._training,
        }
        if kind not in naming:
            raise InvalidInput("nothing is asked for", code="invalid_request")
        request_id, lane, model_id = naming[kind](request)
        self.operations.submit(request_id, lane, request)
        return tinker.SubmitTinkerResponse(request_id=request_id, model_id=model_id)

    def CollectTinkerResults(
        self, request: tinker.CollectTinkerResultsRequest, context: grpc.ServicerContext
    ) -> tinker.CollectTinkerResultsResponse:
        """What is done of what the tenant asked for."""
        response = tinker.CollectTinkerResultsResponse()
        size = 0
        for result in self.operations.collect(request.tenant, iter(request.request_ids)):
            response.results.append(result)
            size += result.ByteSize()
            if size > MOST_BYTES:
                break
        return response

    def GetTinkerModel(
        self, request: tinker.GetTinkerModelRequest, context: grpc.ServicerContext
    ) -> tinker.GetTinkerModelResponse:
        """A model in training."""
        found = self.sessions.model(request.tenant, request.model_id)
        return tinker.GetTinkerModelResponse(
            model_id=found.id, lora=_lora(found.adapter.shape), steps=found.adapter.steps
        )

    def OpenTinkerSampler(
        self, request: tinker.OpenTinkerSamplerRequest, context: grpc.ServicerContext
    ) -> tinker.OpenTinkerSamplerResponse:
        """A sampling session of a checkpoint, or of the base model."""
        if request.model_path:
            self.store.find(request.tenant, request.model_path)
        else:
            self._require_base(request.base_model)
        number = request.sampling_session_seq_id
        opened = self.sessions.add_sampler(request.tenant, request.session_id, number, request.model_path)
        return tinker.OpenTinkerSamplerResponse(sampling_session_id=opened)

    def GetTinkerSampler(
        self, request: tinker.GetTinkerSamplerRequest, context: grpc.ServicerContext
    ) -> tinker.GetTinkerSamplerResponse:
        """What a sampling session draws from."""
        found = self.sessions.sampler(request.tenant, request.sampling_session_id)
        return tinker.GetTinkerSamplerResponse(model_path=found.path)

    def ListTinkerCheckpoints(
        self, request: tinker.ListTinkerCheckpointsRequest, context: grpc.ServicerContext
    ) -> tinker.ListTinkerCheckpointsResponse:
        """The tenant's, the oldest first."""
        found = self.store.all(request.tenant, request.model_id)
        return tinker.ListTinkerCheckpointsResponse(checkpoints=map(_checkpoint, found))

    def GetTinkerCheckpoint(
        self, request: tinker.GetTinkerCheckpointRequest, context: grpc.ServicerContext
    ) -> tinker.GetTinkerCheckpointResponse:
        """One of the tenant's."""
        return tinker.GetTinkerCheckpointResponse(checkpoint=_checkpoint(self.store.find(request.tenant, request.path)))

    def DeleteTinkerCheckpoint(
        self, request: tinker.DeleteTinkerCheckpointRequest, context: grpc.ServicerContext
    ) -> tinker.DeleteTinkerCheckpointResponse:
        """For good, with the samplers that draw from it."""
        self.store.delete(request.tenant, request.path)
        self.sessions.drop_samplers(request.tenant, request.path)
        return tinker.DeleteTinkerCheckpointResponse()

    def _creation(self, request: tinker.SubmitTinkerRequest) -> Named:
        asked = request.create_model
        self.sessions.require(request.tenant, asked.session_id)
        self._require_base(asked.base_model)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        return f"{model_id}:0", model_id, model_id

    def _loading(self, request: tinker.SubmitTinkerRequest) -> Named:
        asked = request.load_weights
        self.store.find(request.tenant, asked.path)
        if asked.model_id:
            self.sessions.require_model(request.tenant, asked.model_id)
            return f"{asked.model_id}:{asked.seq_id}", asked.model_id, asked.model_id
        self.sessions.require(request.tenant, asked.session_id)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        return f"{model_id}:0", model_id, model_id

    def _training(self, request: tinker.SubmitTinkerRequest) -> Named:
        asked = getattr(request, request.WhichOneof("operation") or "")
        self.sessions.require_model(request.tenant, asked.model_id)
        return f"{asked.model_id}:{asked.seq_id}", asked.model_id, asked.model_id

    def _sampling(self, request: tinker.SubmitTinkerRequest) -> Named:
        asked = request.sample
        sampler = self.sessions.sampler(request.tenant, asked.sampling_session_id)
        asked.max_tokens = min(asked.max_tokens or self.settings.max_new_tokens, self.settings.max_new_tokens)
        room = self.model.max_tokens - len(asked.prompt)
        if not asked.prompt or room < 1:
            message = f"the prompt has {len(asked.prompt)} tokens; 1 to {self.model.max_tokens - 1} are taken"
            raise InvalidInput(message, code="prompt_too_long")
        if min(asked.prompt) < 0 or max(asked.prompt) >= self.model.vocabulary:
            raise InvalidInput("a token id of the prompt is outside the vocabulary", code="token_out_of_range")
        if not 1 <= asked.num_samples <= self.settings.max_sequences:
            raise InvalidInput(f"1 to {self.settings.max_sequences} samples are drawn", code="tinker_limit")
        if not 0 <= asked.prompt_logprobs_last < max(len(asked.prompt), 1):
            raise InvalidInput("there are not so many tokens to score", code="invalid_request")
        # Samplers of one checkpoint share a lane: they are drawn from together.
        return f"{sampler.id}:{asked.seq_id}", f"sample:{sampler.path}", ""

    def _require_base(self, name: str) -> None:
        if name not in (self.name, str(self.model.path)):
            raise InvalidInput(f"the base model here is {self.name}", code="tinker_model")


def _lora(shape: LoraShape) -> tinker.TinkerLora:
    return tinker.TinkerLora(rank=shape.rank, train_unembed=shape.head, train_mlp=shape.mlp, train_attn=shape.attention)


def _checkpoint(found: AdapterCheckpoint) -> tinker.TinkerCheckpoint:
    return tinker.TinkerCheckpoint(
        path=str(found.path),
        model_id=found.path.model_id,
        created_unix_ms=found.created_unix_ms,
        expires_unix_ms=found.expires_unix_ms,
        size_bytes=found.size_bytes,
        lora=_lora(found.shape),
        steps=found.steps,
    )


def assemble(settings: Settings) -> tuple[TinkerService, TinkerWorker]:
    """Loads the model. Raises InvalidInput where its folder may not or cannot be loaded."""
    model = SharedModel(settings.model, settings.dtype)
    model.max_tokens = min(model.max_tokens, settings.max_context_tokens)
    sessions = Sessions(
        settings.silence_seconds,
        settings.max_models,
        settings.max_models_per_tenant,
        settings.max_sessions_per_tenant,
        settings.max_samplers_per_tenant,
    )
    operations = Operations(settings.max_waiting, settings.operation_seconds, settings.result_seconds)
    store = CheckpointStore(settings.state_path / "tinker", model.hash, settings.max_checkpoints_per_tenant)
    parts = (settings, model, sessions, operations, store)
    return TinkerService(*parts), TinkerWorker(*parts)
