"""Requests in Tinker's form, as far as they are served; what is not is refused by name, never left out silently."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from spo.errors import FieldViolation, InvalidInput
from spo.v1 import tinker_service_pb2 as tinker

Id = Annotated[str, Field(min_length=1, max_length=200)]
Path = Annotated[str, Field(max_length=400)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


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
