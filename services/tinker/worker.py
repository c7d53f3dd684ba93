"""The one thread that computes: takes operations in turn, and says what came of each."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

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
from spo.v1 import tinker_service_pb2 as wire

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
