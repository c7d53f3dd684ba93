"""gRPC service of the Tinker API: says whose everything is before anything is queued; put together with its worker.

The one thread that computes: takes operations in turn, and says what came of each.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import grpc
import torch

from services.tinker import shared_model as tensors
from services.tinker.sessions import (
    UNNAMED,
    AdapterCheckpoint,
    CheckpointPath,
    CheckpointStore,
    Operation,
    Operations,
    SavedAdapter,
    Sessions,
    TrainedModel,
    checked_name,
)
from services.tinker.settings import Settings
from services.tinker.shared_model import (
    LOSSES,
    LoraShape,
    SampledTokens,
    SamplingOptions,
    SharedModel,
    TrainingAdapter,
    prompt_logprobs,
    sample,
)
from spo.errors import Conflict, InvalidInput, NotFound, ResourceExhausted, SpoError
from spo.model.folder import Adapter
from spo.observability import get_logger
from spo.v1 import tinker_service_pb2 as tinker, tinker_service_pb2 as wire
from spo.v1.tinker_service_pb2_grpc import TinkerServiceServicer

log = get_logger("tinker")

LOOK_SECONDS = 0.5
SWEEP_SECONDS = 60.0
AUTOSAVE = "autosave"
# Sampling requests of one lane that may be drawn together.
MOST_TOGETHER = 64
_USERS = (InvalidInput, NotFound, Conflict, ResourceExhausted)


class TinkerWorker:
    """Everything that touches the model is done here."""

    def __init__(
        self, settings: Settings, model: SharedModel, sessions: Sessions, operations: Operations, store: CheckpointStore
    ) -> None:
        self.settings = settings
        self.model = model
        self.sessions = sessions
        self.operations = operations
        self.store = store
        # AdapterCheckpoint path to the adapter that holds it, the one used last at the end.
        self._samplers: OrderedDict[str, str] = OrderedDict()
        self._made = 0
        self._swept = time.monotonic()

    def run(self, stop: threading.Event) -> None:
        """Until stopped; then every model's state is saved."""
        self.store.forget_unnamed()
        while not stop.is_set():
            taken = self.operations.take(LOOK_SECONDS, _are_drawn_together, MOST_TOGETHER)
            if taken:
                self.perform(taken)
            self._look_after()
        for model in self.sessions.models():
            self._autosave(model)

    def perform(self, taken: Sequence[Operation]) -> None:
        """Do operations that belong together; whatever goes wrong is their result."""
        alive = [operation for operation in taken if self._guarded([operation], operation.check)]
        if alive and alive[0].request.WhichOneof("operation") == "sample":
            self._guarded(alive, lambda: self._sample(alive))
        elif alive:
            self._guarded(alive, lambda: self.operations.end(alive[0], self._result(alive[0])))

    def _guarded(self, operations: Sequence[Operation], body: Callable[[], object]) -> bool:
        """Whether the body ended well; if not, that is the result of all operations that have none yet."""
        try:
            body()
        except SpoError as error:
            failure = wire.TinkerFailure(
                message=f"{error.message} [{error.code}]", category="user" if isinstance(error, _USERS) else "server"
            )
        except Exception as error:
            log.exception("an operation failed")
            failure = wire.TinkerFailure(message=f"{type(error).__name__}: {error}"[:500], category="server")
        else:
            return True
        for operation in operations:
            if operation.result is None:
                self.operations.end(operation, wire.TinkerResult(failure=failure))
        return False

    def _result(self, operation: Operation) -> wire.TinkerResult:
        request, tenant = operation.request, operation.tenant
        match request.WhichOneof("operation"):
            case "create_model":
                return self._create(tenant, request.create_model)
            case "forward_backward":
                adapter = self.sessions.model(tenant, request.forward_backward.model_id).adapter
                output = adapter.forward_backward(request.forward_backward, operation.check)
                return wire.TinkerResult(forward_backward=output)
            case "optim_step":
                return self._step(tenant, request.optim_step)
            case "save_weights":
                return self._save(tenant, request.save_weights)
            case "load_weights":
                return self._load(tenant, request.load_weights)
        raise InvalidInput("nothing is asked for", code="invalid_request")

    def _create(self, tenant: str, asked: wire.CreateTinkerModel) -> wire.TinkerResult:
        lora = asked.lora
        if not 1 <= lora.rank <= self.settings.max_rank:
            raise InvalidInput(f"the rank is 1 to {self.settings.max_rank}", code="tinker_model")
        shape = LoraShape(lora.rank, attention=lora.train_attn, mlp=lora.train_mlp, head=lora.train_unembed)
        seed = lora.seed % (1 << 63) if lora.HasField("seed") else None
        made = self._add(tenant, asked.session_id, asked.model_seq_id, shape, seed)
        return wire.TinkerResult(made=wire.TinkerMade(model_id=made.id))

    def _add(self, tenant: str, session_id: str, number: int, shape: LoraShape, seed: int | None) -> TrainedModel:
        self.sessions.require(tenant, session_id)
        self.sessions.require_room(tenant)
        model_id = f"{session_id}:train:{number}"
        adapter = TrainingAdapter(self.model, model_id, shape, seed, self.settings.tokens_per_pass)
        made = TrainedModel(model_id, session_id, tenant, adapter)
        self.sessions.add_model(made)
        log.info("a model is trained", model=model_id, rank=shape.rank)
        return made

    def _step(self, tenant: str, asked: wire.StepTinkerOptimizer) -> wire.TinkerResult:
        model = self.sessions.model(tenant, asked.model_id)
        metrics = model.adapter.step(asked)
        if self.settings.autosave_steps and model.adapter.steps % self.settings.autosave_steps == 0:
            self._autosave(model)
        return wire.TinkerResult(stepped=wire.TinkerStepped(metrics=metrics))

    def _save(self, tenant: str, asked: wire.SaveTinkerWeights) -> wire.TinkerResult:
        model = self.sessions.model(tenant, asked.model_id)
        if not asked.name:
            self.sessions.require_sampler_room(tenant, model.session_id, asked.sampling_session_seq_id)
        name = checked_name(asked.name) if asked.name else f"{UNNAMED}{asked.sampling_session_seq_id}"
        path = CheckpointPath(model.id, "sampler_weights" if asked.for_sampler else "weights", name)
        self._write(model, path, asked.ttl_seconds, overwrite=asked.overwrite)
        saved = wire.TinkerSaved(path=str(path))
        if not asked.name:
            number = asked.sampling_session_seq_id
            saved.sampling_session_id = self.sessions.add_sampler(tenant, model.session_id, number, str(path))
            for old in self.store.unnamed(model.id)[: -self.settings.kept_samplers]:
                self.store.remove(old)
                self.sessions.drop_samplers(tenant, str(old.path))
        return wire.TinkerResult(saved=saved)

    def _write(self, model: TrainedModel, path: CheckpointPath, ttl_seconds: int, *, overwrite: bool) -> None:
        adapter, now = model.adapter, time.time_ns() // 1_000_000
        expires = now + ttl_seconds * 1000 if ttl_seconds else 0
        head = AdapterCheckpoint(path, model.tenant, adapter.shape, adapter.steps, now, expires, 0)
        saved = SavedAdapter(head, adapter.tensors(), adapter.moments() if path.kind == "weights" else {})
        config = Adapter(self.model.hash, self.model.peft_config(adapter.shape))
        self.store.write(head, config, saved, overwrite=overwrite)

    def _load(self, tenant: str, asked: wire.LoadTinkerWeights) -> wire.TinkerResult:
        saved = self.store.load(tenant, asked.path)
        shape, steps = saved.checkpoint.shape, saved.checkpoint.steps
        if asked.optimizer and steps and not saved.moments:
            raise InvalidInput(f"{asked.path} has no optimiser state: it is for sampling", code="tinker_model")
        if asked.model_id:
            model = self.sessions.model(tenant, asked.model_id)
            if model.adapter.shape != shape:
                raise InvalidInput(f"{asked.path} is of another rank or other layers", code="tinker_model")
        else:
            model = self._add(tenant, asked.session_id, asked.model_seq_id, shape, seed=0)
        model.adapter.take(saved.tensors, saved.moments if asked.optimizer else {}, steps)
        return wire.TinkerResult(loaded=wire.TinkerLoaded(path=asked.path, model_id=model.id))

    def _sample(self, operations: Sequence[Operation]) -> None:
        """Draw what all of them ask for, so many sequences at once as the settings say."""
        first = operations[0]
        sampler = self.sessions.sampler(first.tenant, first.request.sample.sampling_session_id)
        self.model.use(self._sampler_adapter(first.tenant, sampler.path))
        drawn = {operation.request_id: self._sequences(operation.request.sample) for operation in operations}
        flat = [sequence for sequences in drawn.values() for sequence in sequences]

        def check() -> None:
            if all(time.monotonic() > operation.deadline for operation in operations):
                first.check()

        for start in range(0, len(flat), self.settings.max_sequences):
            sample(self.model, flat[start : start + self.settings.max_sequences], check)
        for operation in operations:
            asked = operation.request.sample
            response = wire.TinkerSampleResponse(sequences=map(_sequence, drawn[operation.request_id]))
            if asked.prompt_logprobs:
                known = prompt_logprobs(self.model, asked.prompt, asked.prompt_logprobs_last)
                response.prompt_logprobs = tensors.floats(known)
            self.operations.end(operation, wire.TinkerResult(sampled=response))

    def _sampler_adapter(self, tenant: str, path: str) -> str | None:
        """The adapter in memory that holds a checkpoint; the one not used for longest makes room for it."""
        if not path:
            return None
        checkpoint = self.store.find(tenant, path)
        key = f"{path}@{checkpoint.created_unix_ms}"
        if key not in self._samplers:
            saved = self.store.load(tenant, path)
            while len(self._samplers) >= self.settings.sampler_slots:
                self.model.remove(self._samplers.popitem(last=False)[1])
            self._made += 1
            name = f"sampler-{self._made}"
            self.model.add(name, checkpoint.shape, seed=0)
            self.model.fill(name, saved.tensors)
            self._samplers[key] = name
        self._samplers.move_to_end(key)
        return self._samplers[key]

    def _sequences(self, asked: wire.SampleTinker) -> list[SampledTokens]:
        options = SamplingOptions(
            max_tokens=min(asked.max_tokens, self.model.max_tokens - len(asked.prompt)),
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            stop_tokens=frozenset(asked.stop_tokens) if asked.stops_given else self.model.end_tokens,
            stop_strings=tuple(asked.stop_strings),
        )
        seed = asked.seed if asked.HasField("seed") else secrets.randbits(62)
        return [
            SampledTokens(asked.prompt, options, torch.Generator().manual_seed((seed + number) % (1 << 63)))
            for number in range(asked.num_samples)
        ]

    def _look_after(self) -> None:
        """End what nobody uses any more; on the thread that computes, since models go with it."""
        for model in self.sessions.take_ended():
            self._autosave(model)
            self.sessions.drop_model(model.id)
            model.adapter.close()
            self._tidy(partial(self._forget_unnamed, model.id))
        if time.monotonic() - self._swept > SWEEP_SECONDS:
            self._swept = time.monotonic()
            self._tidy(self.store.sweep)

    def _forget_unnamed(self, model_id: str) -> None:
        for unnamed in self.store.unnamed(model_id):
            self.store.remove(unnamed)

    @staticmethod
    def _tidy(body: Callable[[], object]) -> None:
        """Remove files; what cannot be removed now ends nobody's training."""
        try:
            body()
        except OSError as error:
            log.warning("files of the Tinker API stay", reason=str(error)[:500])

    def _autosave(self, model: TrainedModel) -> None:
        """To `weights/autosave`, where something has been learnt since; a failure costs nobody's step."""
        if not self.settings.autosave_steps or model.adapter.steps == model.saved_steps:
            return
        try:
            self._write(model, CheckpointPath(model.id, "weights", AUTOSAVE), 0, overwrite=True)
            model.saved_steps = model.adapter.steps
        except (SpoError, OSError) as error:
            log.warning("a model could not be saved by itself", model=model.id, reason=str(error)[:500])


def _sequence(drawn: SampledTokens) -> wire.TinkerSampledSequence:
    # 0 on the wire: it stopped by itself.
    reason = wire.TINKER_STOP_REASON_UNSPECIFIED if drawn.stopped else wire.TINKER_STOP_REASON_LENGTH
    return wire.TinkerSampledSequence(
        stop_reason=reason, tokens=tensors.ids(drawn.tokens), logprobs=tensors.floats(drawn.logprobs)
    )


def _are_drawn_together(first: Operation, other: Operation) -> bool:
    kinds = {operation.request.WhichOneof("operation") for operation in (first, other)}
    return kinds == {"sample"}


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
