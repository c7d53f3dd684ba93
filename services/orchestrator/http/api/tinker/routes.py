"""Tinker's paths. Not in our OpenAPI document: the contract is that of its client package."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Path, Request, Response
from google.protobuf.message import DecodeError, Message
from starlette.concurrency import run_in_threadpool

from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.http.api.tinker import answers, requests
from services.orchestrator.http.api.tinker.answers import Json
from services.orchestrator.http.api.tinker.results import TinkerResults
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep
from spo.errors import InvalidInput, NotFound
from spo.v1 import tinker_service_pb2 as tinker

router = APIRouter(prefix="/tinker/api/v1", include_in_schema=False)

# Longest wait of one request for a result; clients give up after 45 s and ask again.
WAIT_SECONDS = 20.0
ModelId = Annotated[str, Path(pattern=r"^[\w:-]{1,200}$")]
Answer = TypeVar("Answer", bound=Message)
CheckpointId = Annotated[str, Path(pattern=r"^(weights|sampler_weights)/[\w.-]{1,128}$")]


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
def beat_tinker_session(caller: CallerDep, body: requests.HeartbeatBody) -> Json:
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
def create_tinker_model(caller: CallerDep, body: requests.CreateModelBody) -> Json:
    """A LoRA adapter to be trained."""
    return caller.submit(tinker.SubmitTinkerRequest(create_model=body.message()))


@router.post("/get_info")
def describe_tinker_model(caller: CallerDep, body: requests.ModelBody) -> Json:
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
def tinker_optim_step(caller: CallerDep, body: requests.OptimStepBody) -> Json:
    """AdamW along the gradient that was kept."""
    return caller.submit(tinker.SubmitTinkerRequest(optim_step=body.message()))


@router.post("/save_weights")
def save_tinker_weights(caller: CallerDep, body: requests.SaveWeightsBody) -> Json:
    """Weights and the optimiser's state, to go on from."""
    return caller.submit(tinker.SubmitTinkerRequest(save_weights=body.message(for_sampler=False)))


@router.post("/save_weights_for_sampler")
def save_tinker_sampler(caller: CallerDep, body: requests.SaveWeightsBody) -> Json:
    """Weights to sample from, by a name or for one sampling session."""
    return caller.submit(tinker.SubmitTinkerRequest(save_weights=body.message(for_sampler=True)))


@router.post("/load_weights")
def load_tinker_weights(caller: CallerDep, body: requests.LoadWeightsBody) -> Json:
    """Into a model that is there, or a new one."""
    return caller.submit(tinker.SubmitTinkerRequest(load_weights=body.message()))


@router.post("/create_sampling_session")
def open_tinker_sampler(caller: CallerDep, body: requests.SamplingSessionBody) -> Json:
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
def tinker_sample(caller: CallerDep, body: requests.SampleBody) -> Json:
    """Queue samples; each has an id from the start."""
    queued = caller.submit(tinker.SubmitTinkerRequest(sample=body.message()))
    ids = [f"{queued['request_id']}:{number}" for number in range(body.num_samples)]
    return {**queued, "sample_sequence_ids": ids}


@router.post("/retrieve_future")
async def retrieve_tinker_result(caller: CallerDep, results: ResultsDep, body: requests.RetrieveBody) -> Response:
    """What came of an operation, waited for a while."""
    found = await results.of(caller.tenant, body.request_id, WAIT_SECONDS)
    return answers.of_result(found) if found else answers.pending(body.request_id)


@router.post("/weights_info")
def describe_tinker_checkpoint(caller: CallerDep, body: requests.CheckpointBody) -> Json:
    """What a checkpoint is an adapter of."""
    asked = tinker.GetTinkerCheckpointRequest(tenant=caller.tenant, path=body.tinker_path)
    lora = caller.call("GetTinkerCheckpoint", asked, tinker.GetTinkerCheckpointResponse).checkpoint.lora
    changed = {"train_unembed": lora.train_unembed, "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
    return {"base_model": caller.described().base_model, "is_lora": True, "lora_rank": lora.rank, **changed}


@router.get("/checkpoints")
def list_tinker_checkpoints(caller: CallerDep) -> Json:
    """All of the tenant's."""
    found = [answers.checkpoint(each) for each in caller.checkpoints()]
    return {"checkpoints": found, "cursor": {"offset": 0, "limit": len(found), "total_count": len(found)}}


@router.get("/training_runs")
def list_tinker_runs(caller: CallerDep) -> Json:
    """The tenant's models that have checkpoints."""
    found, base = caller.checkpoints(), caller.described().base_model
    model_ids = dict.fromkeys(each.model_id for each in reversed(found))
    runs = [answers.training_run(name, base, [each for each in found if each.model_id == name]) for name in model_ids]
    return {"training_runs": runs, "cursor": {"offset": 0, "limit": len(runs), "total_count": len(runs)}}


@router.get("/training_runs/{model_id}")
def get_tinker_run(caller: CallerDep, model_id: ModelId) -> Json:
    """One of them."""
    found = caller.checkpoints(model_id)
    if not found:
        raise NotFound(f"there is no training run {model_id}", code="tinker_not_found")
    return answers.training_run(model_id, caller.described().base_model, found)


@router.get("/training_runs/{model_id}/checkpoints")
def list_tinker_run_checkpoints(caller: CallerDep, model_id: ModelId) -> Json:
    """Of one model."""
    return {"checkpoints": [answers.checkpoint(each) for each in caller.checkpoints(model_id)]}


@router.delete("/training_runs/{model_id}/checkpoints/{checkpoint_id:path}", status_code=204)
def delete_tinker_checkpoint(caller: CallerDep, model_id: ModelId, checkpoint_id: CheckpointId) -> None:
    """For good."""
    path = f"tinker://{model_id}/{checkpoint_id}"
    asked = tinker.DeleteTinkerCheckpointRequest(tenant=caller.tenant, path=path)
    caller.call("DeleteTinkerCheckpoint", asked, tinker.DeleteTinkerCheckpointResponse)
