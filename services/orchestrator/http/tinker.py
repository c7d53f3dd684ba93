"""Tinker's paths: requests, answers in protobuf or JSON, and results waited for. Not in our OpenAPI document: the
contract is that of its client package.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path as FastapiPath, Request, Response
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError, Message
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from services.orchestrator.auth import Principal
from services.orchestrator.container import AppContext, ContextDep, PrincipalDep
from spo.errors import FieldViolation, InvalidInput, NotFound, SpoError
from spo.rpc.client import RpcClient
from spo.v1 import tinker_service_pb2 as tinker

Id = Annotated[str, Field(min_length=1, max_length=200)]
Path = Annotated[str, Field(max_length=400)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]

PROTOBUF = "application/x-protobuf"
Json = dict[str, object]

POLL_SECONDS = 0.05
# Clients ask again at once after an error, so one is not told sooner.
ERROR_SECONDS = 1.0
CALL_SECONDS = 10.0
# Of ids in one question.
MOST_IDS = 1000

Key = tuple[str, str]

router = APIRouter(prefix="/tinker/api/v1", include_in_schema=False)

# Longest wait of one request for a result; clients give up after 45 s and ask again.
WAIT_SECONDS = 20.0
ModelId = Annotated[str, FastapiPath(pattern=r"^[\w:-]{1,200}$")]
Answer = TypeVar("Answer", bound=Message)
CheckpointId = Annotated[str, FastapiPath(pattern=r"^(weights|sampler_weights)/[\w.-]{1,128}$")]


class TinkerPart(BaseModel):
    """What clients send besides is theirs: metadata, fields of later releases."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class HeartbeatBody(TinkerPart):
    session_id: Id


class LoraBody(TinkerPart):
    rank: int = Field(ge=1, le=4096)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def message(self) -> tinker.TinkerLora:
        """As the service takes it."""
        return tinker.TinkerLora(**self.model_dump(exclude_none=True))


class OptimizerBody(TinkerPart):
    type: Literal["adamw"] = "adamw"


class CreateModelBody(TinkerPart):
    session_id: Id
    model_seq_id: Number
    base_model: Path
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()

    def message(self) -> tinker.CreateTinkerModel:
        """As the service takes it. Raises InvalidInput without a LoRA: all weights are never trained here."""
        if self.lora_config is None:
            raise _refused("lora_config", "only LoRA adapters are trained here")
        return tinker.CreateTinkerModel(
            session_id=self.session_id,
            model_seq_id=self.model_seq_id,
            base_model=self.base_model,
            lora=self.lora_config.message(),
        )


class AdamBody(TinkerPart):
    learning_rate: Rate = 1e-4
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: Rate = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: float = Field(default=0.0, allow_inf_nan=False)


class OptimStepBody(TinkerPart):
    model_id: Id
    seq_id: Number
    adam_params: AdamBody = Field(validation_alias=AliasChoices("adam_params", "optim_params"))

    def message(self) -> tinker.StepTinkerOptimizer:
        """As the service takes it."""
        numbers = self.adam_params.model_dump()
        numbers["grad_clip_norm"] = max(0.0, self.adam_params.grad_clip_norm)
        return tinker.StepTinkerOptimizer(model_id=self.model_id, seq_id=self.seq_id, **numbers)


class SaveWeightsBody(TinkerPart):
    model_id: Id
    path: str | None = Field(default=None, max_length=200)
    seq_id: Number
    ttl_seconds: int | None = Field(default=None, ge=3600, le=10 * 366 * 86400)
    overwrite: bool = False
    sampling_session_seq_id: Number | None = None

    def message(self, *, for_sampler: bool) -> tinker.SaveTinkerWeights:
        """As the service takes it. Raises InvalidInput where nothing says how the checkpoint is called."""
        if not self.path and not (for_sampler and self.sampling_session_seq_id is not None):
            raise _refused("path", "a checkpoint has a name")
        return tinker.SaveTinkerWeights(
            model_id=self.model_id,
            seq_id=self.seq_id,
            name=self.path or "",
            for_sampler=for_sampler,
            sampling_session_seq_id=self.sampling_session_seq_id or 0,
            overwrite=self.overwrite,
            ttl_seconds=self.ttl_seconds or 0,
        )


class LoadWeightsBody(TinkerPart):
    path: Path
    optimizer: bool
    model_id: Id | None = None
    seq_id: Number = 0
    session_id: Id | None = None
    model_seq_id: Number = 0
    optimizer_config: OptimizerBody | None = None

    def message(self) -> tinker.LoadTinkerWeights:
        """As the service takes it. Raises InvalidInput unless it is for one model."""
        if (self.model_id is None) == (self.session_id is None):
            raise _refused("model_id", "either a model that is there or a session's next")
        return tinker.LoadTinkerWeights(**self.model_dump(exclude_none=True, exclude={"optimizer_config"}))


class ChunkBody(TinkerPart):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token]


class PromptBody(TinkerPart):
    chunks: list[ChunkBody] = Field(max_length=1000)


class SamplingBody(TinkerPart):
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    stop: str | list[Annotated[str, Field(min_length=1, max_length=1000)]] | list[Token] | None = None
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(TinkerPart):
    sampling_session_id: Id
    seq_id: int = Field(ge=0, lt=2**63)
    prompt: PromptBody
    num_samples: int = Field(default=1, ge=1, le=4096)
    sampling_params: SamplingBody = SamplingBody()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1, lt=2**31)
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0

    def message(self) -> tinker.SampleTinker:
        """As the service takes it. Raises InvalidInput on what is not offered."""
        unoffered = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
        for name in unoffered:
            if getattr(self, name):
                raise _refused(name, "it is not offered here")
        options, stop = self.sampling_params, self.sampling_params.stop
        stops = [stop] if isinstance(stop, str) else stop or []
        message = tinker.SampleTinker(
            sampling_session_id=self.sampling_session_id,
            seq_id=self.seq_id,
            prompt=[token for chunk in self.prompt.chunks for token in chunk.tokens],
            num_samples=self.num_samples,
            max_tokens=options.max_tokens or 0,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop_strings=[each for each in stops if isinstance(each, str)],
            stop_tokens=[each for each in stops if isinstance(each, int)],
            # An empty list switches off even the model's own end; a string alone leaves it on.
            stops_given=isinstance(stop, list) and not any(isinstance(each, str) for each in stop),
            prompt_logprobs=bool(self.prompt_logprobs),
            prompt_logprobs_last=self.prompt_logprobs_last_n or 0,
        )
        if options.seed is not None:
            message.seed = options.seed % (1 << 62)
        return message


class SamplingSessionBody(TinkerPart):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: Path | None = None
    model_path: Path | None = None


class RetrieveBody(TinkerPart):
    request_id: Annotated[str, Field(min_length=1, max_length=300)]


class ModelBody(TinkerPart):
    model_id: Id


class CheckpointBody(TinkerPart):
    tinker_path: Path


def _refused(name: str, message: str) -> InvalidInput:
    violation = FieldViolation(f"/{name}", message)
    return InvalidInput(f"{name}: {message}", code="invalid_request", violations=(violation,))


def pending(request_id: str) -> Response:
    """It is not done; clients ask again at once."""
    return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)


def of_result(result: tinker.TinkerResult) -> Response:
    """What came of an operation. Raises NotFound where nobody of this tenant asked for it."""
    match result.WhichOneof("result"):
        case "forward_backward":
            return Response(result.forward_backward.SerializeToString(), media_type=PROTOBUF)
        case "sampled":
            return Response(result.sampled.SerializeToString(), media_type=PROTOBUF)
        case "failure":
            return JSONResponse({"error": result.failure.message, "category": result.failure.category})
        case "made":
            return JSONResponse({"type": "create_model", "model_id": result.made.model_id})
        case "stepped":
            return JSONResponse({"metrics": dict(result.stepped.metrics)})
        case "loaded":
            loaded = result.loaded
            return JSONResponse({"type": "load_weights", "path": loaded.path, "model_id": loaded.model_id})
        case "saved":
            return JSONResponse(_saved(result.saved))
    message = f"there is no result of {result.request_id}: it is too old, or the service has restarted since"
    raise NotFound(message, code="tinker_not_found")


def training_run(model_id: str, base_model: str, found: list[tinker.TinkerCheckpoint]) -> Json:
    """A model as a run, from its checkpoints (at least one)."""
    newest = found[-1]
    of_kind = {kind: [each for each in found if f"/{kind}/" in each.path] for kind in ("weights", "sampler_weights")}
    trained, sampled = of_kind["weights"], of_kind["sampler_weights"]
    return {
        "training_run_id": model_id,
        "base_model": base_model,
        "model_owner": "you",
        "is_lora": True,
        "lora_rank": newest.lora.rank,
        "last_request_time": _time(newest.created_unix_ms),
        "last_checkpoint": checkpoint(trained[-1]) if trained else None,
        "last_sampler_checkpoint": checkpoint(sampled[-1]) if sampled else None,
    }


def checkpoint(found: tinker.TinkerCheckpoint) -> Json:
    """One checkpoint; its id is what follows the model's in its path."""
    kind, _, name = found.path.rpartition("/")
    is_sampler = kind.endswith("/sampler_weights")
    return {
        "checkpoint_id": f"{kind.rpartition('/')[2]}/{name}",
        "checkpoint_type": "sampler" if is_sampler else "training",
        "time": _time(found.created_unix_ms),
        "tinker_path": found.path,
        "size_bytes": found.size_bytes,
        "public": False,
        "expires_at": _time(found.expires_unix_ms) if found.expires_unix_ms else None,
    }


def _saved(saved: tinker.TinkerSaved) -> Json:
    kind = "save_weights_for_sampler" if "/sampler_weights/" in saved.path else "save_weights"
    if saved.sampling_session_id:
        return {"type": kind, "path": None, "sampling_session_id": saved.sampling_session_id}
    return {"type": kind, "path": saved.path}


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat()


class TinkerResults:
    """Used from one event loop."""

    def __init__(self, service: RpcClient) -> None:
        self.service = service
        self._awaited: dict[Key, asyncio.Future[tinker.TinkerResult]] = {}
        self._task: asyncio.Task[None] | None = None

    async def of(self, tenant: str, request_id: str, seconds: float) -> tinker.TinkerResult | None:
        """What came of an operation; None when it is not done within so many seconds. Raises what the service says."""
        key = (tenant, request_id)
        if key not in self._awaited:
            self._awaited[key] = asyncio.get_running_loop().create_future()
        awaited = self._awaited[key]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        done, _ = await asyncio.wait((awaited,), timeout=seconds)
        if not done:
            if self._awaited.get(key) is awaited:
                del self._awaited[key]
            return None
        return awaited.result()

    async def _poll(self) -> None:
        while self._awaited:
            by_tenant: dict[str, list[str]] = defaultdict(list)
            for tenant, request_id in list(self._awaited):
                by_tenant[tenant].append(request_id)
            for tenant, request_ids in by_tenant.items():
                for start in range(0, len(request_ids), MOST_IDS):
                    await self._ask(tenant, request_ids[start : start + MOST_IDS])
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, tenant: str, request_ids: list[str]) -> None:
        request = tinker.CollectTinkerResultsRequest(tenant=tenant, request_ids=request_ids)
        try:
            found = await run_in_threadpool(self.service.call, "CollectTinkerResults", request, CALL_SECONDS)
        except SpoError as error:
            await asyncio.sleep(ERROR_SECONDS)
            for request_id in request_ids:
                awaited = self._awaited.pop((tenant, request_id), None)
                if awaited and not awaited.done():
                    awaited.set_exception(error)
                    # Whoever waited may have gone.
                    awaited.exception()
            return
        for result in found.results:
            awaited = self._awaited.pop((tenant, result.request_id), None)
            if awaited and not awaited.done():
                awaited.set_result(result)


class TinkerCaller:
    """The service as one tenant sees it."""

    def __init__(self, context: AppContext, principal: Principal) -> None:
        self.context = context
        self.tenant = principal.tenant

    def call(self, method: str, request: Message, kind: type[Answer]) -> Answer:
        """An answer of this kind. Raises NotFound where there is no such service, else what the service raises."""
        if not self.context.settings.tinker_address:
            message = "this platform serves no Tinker API: SPO_TINKER_ADDRESS names no service"
            raise NotFound(message, code="tinker_not_served")
        answer = self.context.tinker.call(method, request)
        assert isinstance(answer, kind)
        return answer

    def submit(self, request: tinker.SubmitTinkerRequest) -> Json:
        """Queue an operation; what its client needs to ask for the result."""
        request.tenant = self.tenant
        found = self.call("SubmitTinker", request, tinker.SubmitTinkerResponse)
        return {"request_id": found.request_id, "model_id": found.model_id or None}

    def described(self) -> tinker.DescribeTinkerResponse:
        """The base model."""
        return self.call("DescribeTinker", tinker.DescribeTinkerRequest(), tinker.DescribeTinkerResponse)

    def checkpoints(self, model_id: str = "") -> list[tinker.TinkerCheckpoint]:
        """The tenant's, the oldest first."""
        asked = tinker.ListTinkerCheckpointsRequest(tenant=self.tenant, model_id=model_id)
        return list(self.call("ListTinkerCheckpoints", asked, tinker.ListTinkerCheckpointsResponse).checkpoints)


def _caller(context: ContextDep, principal: PrincipalDep) -> TinkerCaller:
    return TinkerCaller(context, principal)


async def _results(request: Request, context: ContextDep) -> TinkerResults:
    state = request.app.state
    if not hasattr(state, "tinker_results"):
        state.tinker_results = TinkerResults(context.tinker)
    results: TinkerResults = state.tinker_results
    return results


CallerDep = Annotated[TinkerCaller, Depends(_caller)]
ResultsDep = Annotated[TinkerResults, Depends(_results)]


@router.get("/healthz")
def tinker_health(caller: CallerDep) -> Json:
    """Whether the service answers."""
    caller.described()
    return {"status": "ok"}


@router.get("/get_server_capabilities")
def tinker_capabilities(caller: CallerDep) -> Json:
    """The one base model."""
    found = caller.described()
    model = {"model_name": found.base_model, "max_context_length": found.max_context_tokens}
    return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}


@router.post("/client/config")
def tinker_client_config(caller: CallerDep) -> Json:
    """How clients are to behave: keys as they are, and bodies that this API takes."""
    caller.described()
    largest = caller.context.settings.max_body_bytes
    return {
        "pjwt_auth_enabled": False,
        "proto_compress_fwdbwd": False,
        "parallel_fwdbwd_chunks": False,
        "fwdbwd_max_chunk_bytes_count": largest // 2,
        "use_pyqwest_transport": False,
    }


@router.post("/client/dynamic_config")
def tinker_dynamic_config() -> Json:
    """Nothing that differs from the client's defaults."""
    return {}


@router.post("/telemetry")
def tinker_telemetry() -> Json:
    """Taken and dropped: nothing of it is kept."""
    return {"status": "accepted"}


@router.post("/create_session")
def create_tinker_session(caller: CallerDep) -> Json:
    """For one client process."""
    found = caller.call(
        "OpenTinkerSession", tinker.OpenTinkerSessionRequest(tenant=caller.tenant), tinker.OpenTinkerSessionResponse
    )
    return {"type": "create_session", "session_id": found.session_id}


@router.post("/session_heartbeat")
def beat_tinker_session(caller: CallerDep, body: HeartbeatBody) -> Json:
    """Sessions that are silent for long end."""
    asked = tinker.BeatTinkerSessionRequest(tenant=caller.tenant, session_id=body.session_id)
    caller.call("BeatTinkerSession", asked, tinker.BeatTinkerSessionResponse)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
def finish_tinker_session(caller: CallerDep, session_id: ModelId) -> Json:
    """Its models are saved and go."""
    asked = tinker.BeatTinkerSessionRequest(tenant=caller.tenant, session_id=session_id, finish=True)
    caller.call("BeatTinkerSession", asked, tinker.BeatTinkerSessionResponse)
    return {}


@router.post("/create_model")
def create_tinker_model(caller: CallerDep, body: CreateModelBody) -> Json:
    """A LoRA adapter to be trained."""
    return caller.submit(tinker.SubmitTinkerRequest(create_model=body.message()))


@router.post("/get_info")
def describe_tinker_model(caller: CallerDep, body: ModelBody) -> Json:
    """A model, and where its tokenizer is."""
    asked = tinker.GetTinkerModelRequest(tenant=caller.tenant, model_id=body.model_id)
    found, base = caller.call("GetTinkerModel", asked, tinker.GetTinkerModelResponse), caller.described()
    return {
        "type": "get_info",
        "model_data": {"arch": "lora", "model_name": base.base_model, "tokenizer_id": base.tokenizer},
        "model_id": found.model_id,
        "is_lora": True,
        "lora_rank": found.lora.rank,
        "model_name": base.base_model,
    }


@router.post("/forward_backward")
async def tinker_forward_backward(request: Request, caller: CallerDep) -> Json:
    """Protobuf: data and a loss; log-probs, and a gradient that is kept."""
    try:
        asked = tinker.TinkerForwardBackwardRequest.FromString(await request.body())
    except DecodeError:
        raise InvalidInput("the body is no ForwardBackwardRequest", code="malformed_request") from None
    return await run_in_threadpool(caller.submit, tinker.SubmitTinkerRequest(forward_backward=asked))


@router.post("/optim_step")
def tinker_optim_step(caller: CallerDep, body: OptimStepBody) -> Json:
    """AdamW along the gradient that was kept."""
    return caller.submit(tinker.SubmitTinkerRequest(optim_step=body.message()))


@router.post("/save_weights")
def save_tinker_weights(caller: CallerDep, body: SaveWeightsBody) -> Json:
    """Weights and the optimiser's state, to go on from."""
    return caller.submit(tinker.SubmitTinkerRequest(save_weights=body.message(for_sampler=False)))


@router.post("/save_weights_for_sampler")
def save_tinker_sampler(caller: CallerDep, body: SaveWeightsBody) -> Json:
    """Weights to sample from, by a name or for one sampling session."""
    return caller.submit(tinker.SubmitTinkerRequest(save_weights=body.message(for_sampler=True)))


@router.post("/load_weights")
def load_tinker_weights(caller: CallerDep, body: LoadWeightsBody) -> Json:
    """Into a model that is there, or a new one."""
    return caller.submit(tinker.SubmitTinkerRequest(load_weights=body.message()))


@router.post("/create_sampling_session")
def open_tinker_sampler(caller: CallerDep, body: SamplingSessionBody) -> Json:
    """To sample from a checkpoint or the base model."""
    asked = tinker.OpenTinkerSamplerRequest(tenant=caller.tenant, **body.model_dump(exclude_none=True))
    found = caller.call("OpenTinkerSampler", asked, tinker.OpenTinkerSamplerResponse)
    return {"type": "create_sampling_session", "sampling_session_id": found.sampling_session_id}


@router.get("/samplers/{sampler_id}")
def get_tinker_sampler(caller: CallerDep, sampler_id: ModelId) -> Json:
    """What a sampling session draws from."""
    asked = tinker.GetTinkerSamplerRequest(tenant=caller.tenant, sampling_session_id=sampler_id)
    found = caller.call("GetTinkerSampler", asked, tinker.GetTinkerSamplerResponse)
    base = caller.described().base_model
    return {"sampler_id": sampler_id, "base_model": base, "model_path": found.model_path or None}


@router.post("/asample")
def tinker_sample(caller: CallerDep, body: SampleBody) -> Json:
    """Queue samples; each has an id from the start."""
    queued = caller.submit(tinker.SubmitTinkerRequest(sample=body.message()))
    ids = [f"{queued['request_id']}:{number}" for number in range(body.num_samples)]
    return {**queued, "sample_sequence_ids": ids}


@router.post("/retrieve_future")
async def retrieve_tinker_result(caller: CallerDep, results: ResultsDep, body: RetrieveBody) -> Response:
    """What came of an operation, waited for a while."""
    found = await results.of(caller.tenant, body.request_id, WAIT_SECONDS)
    return of_result(found) if found else pending(body.request_id)


@router.post("/weights_info")
def describe_tinker_checkpoint(caller: CallerDep, body: CheckpointBody) -> Json:
    """What a checkpoint is an adapter of."""
    asked = tinker.GetTinkerCheckpointRequest(tenant=caller.tenant, path=body.tinker_path)
    lora = caller.call("GetTinkerCheckpoint", asked, tinker.GetTinkerCheckpointResponse).checkpoint.lora
    changed = {"train_unembed": lora.train_unembed, "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
    return {"base_model": caller.described().base_model, "is_lora": True, "lora_rank": lora.rank, **changed}


@router.get("/checkpoints")
def list_tinker_checkpoints(caller: CallerDep) -> Json:
    """All of the tenant's."""
    found = [checkpoint(each) for each in caller.checkpoints()]
    return {"checkpoints": found, "cursor": {"offset": 0, "limit": len(found), "total_count": len(found)}}


@router.get("/training_runs")
def list_tinker_runs(caller: CallerDep) -> Json:
    """The tenant's models that have checkpoints."""
    found, base = caller.checkpoints(), caller.described().base_model
    model_ids = dict.fromkeys(each.model_id for each in reversed(found))
    runs = [training_run(name, base, [each for each in found if each.model_id == name]) for name in model_ids]
    return {"training_runs": runs, "cursor": {"offset": 0, "limit": len(runs), "total_count": len(runs)}}


@router.get("/training_runs/{model_id}")
def get_tinker_run(caller: CallerDep, model_id: ModelId) -> Json:
    """One of them."""
    found = caller.checkpoints(model_id)
    if not found:
        raise NotFound(f"there is no training run {model_id}", code="tinker_not_found")
    return training_run(model_id, caller.described().base_model, found)


@router.get("/training_runs/{model_id}/checkpoints")
def list_tinker_run_checkpoints(caller: CallerDep, model_id: ModelId) -> Json:
    """Of one model."""
    return {"checkpoints": [checkpoint(each) for each in caller.checkpoints(model_id)]}


@router.delete("/training_runs/{model_id}/checkpoints/{checkpoint_id:path}", status_code=204)
def delete_tinker_checkpoint(caller: CallerDep, model_id: ModelId, checkpoint_id: CheckpointId) -> None:
    """For good."""
    path = f"tinker://{model_id}/{checkpoint_id}"
    asked = tinker.DeleteTinkerCheckpointRequest(tenant=caller.tenant, path=path)
    caller.call("DeleteTinkerCheckpoint", asked, tinker.DeleteTinkerCheckpointResponse)
