"""One in-process vLLM engine, driven by one thread.

`add` and `step` give continuous batching; `load` swaps the weights of the live engine. Three rules keep a swap
correct: the scheduler is paused first (otherwise the engine dies), tensors go through vLLM's layerwise reload (a bare
load_weights is wrong on CPU), and each load has a salt of its own in the prefix cache, so that no later sequence meets
blocks that were computed with other weights. Sequences that run go on with the blocks they have, or, where
`in_flight` is keep, compute them anew.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import vllm
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.llm_engine import LLMEngine

from services.inference.settings import Settings
from services.inference.weights import (
    BACKEND,
    AdapterRoom,
    JoinedBroadcast,
    WorkerExtension,
    forgotten_where_it_fails,
    write_neutral_adapter,
)
from spo.errors import InvalidInput
from spo.model.folder import Shapes, adapter_of, tensor_shapes
from spo.observability import memory_limit_bytes, take_over_logs

# vLLM's CPU attention wants multiples of 32; small blocks let short prompts share their prefix.
CPU_BLOCK_TOKENS = 32
CPU_PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class ServedSampling:
    """How a sequence is sampled and shown that somebody reads: in parts or whole, with this many likely tokens."""

    stream: bool = False
    top_logprobs: int | None = None  # None: no log-probs at all; 0: those of the sampled tokens
    prompt_logprobs: bool = False  # with so many likely tokens, too
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    # Parsers of tool calls look for them.
    shows_special_tokens: bool = False
    # What the answer is held to, as vLLM's JSON; "": nothing.
    structural_tag: str = ""


@dataclass(frozen=True)
class ShownToken:
    """A token of an answer or a prompt, its text, its log-prob and the likeliest in its place.

    logprob: nats; NaN for a prompt's first token.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[ShownToken, ...] = ()


@dataclass(frozen=True)
class SampledPart:
    """What a served sequence has got since its last part; finish_reason "" while it goes on.

    The versions are those of the weights behind the first and last token, once it has finished.
    """

    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: str = ""
    stop_reason: str = ""
    version_first: int = 0
    version_last: int = 0
    # In the first part, where they were asked for.
    prompt: tuple[ShownToken, ...] = ()


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample; temperature 0 is greedy."""

    prompt_token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    # What ends it: texts, and tokens in addition to those of the model's own files.
    stop: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    served: ServedSampling | None = None


@dataclass(frozen=True)
class Sample:
    """One finished sequence.

    logprobs: nats per token, of the distribution that was sampled (temperature and top-p applied). When `stopped`,
    token_ids end with an end token or with the token that completed a stop string. The versions are those of the
    weights behind the first and last token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    version_first: int
    version_last: int


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built for; a run whose spec it fits is served by the same engine."""

    model_path: Path
    model_hash: str
    dtype: Literal["float32", "bfloat16"]
    max_tokens: int  # prompt and response together
    adapters: AdapterRoom | None = None  # the job's versions are adapters of the model

    @property
    def sampler(self) -> str:
        """What made the samples, as trajectories record it."""
        return f"vllm-{vllm.__version__}/{self.dtype}"

    def fits(self, requested: EngineSpec) -> bool:
        """Whether an engine built for this spec can serve the requested one."""
        same = (self.model_hash, self.dtype) == (requested.model_hash, requested.dtype)
        if not (same and self.max_tokens >= requested.max_tokens):
            return False
        if self.adapters is None or requested.adapters is None:
            return self.adapters == requested.adapters
        return self.adapters.holds(requested.adapters)


class Engine:
    """A live vLLM engine; not thread-safe: one thread builds it and makes every call."""

    def __init__(self, spec: EngineSpec, settings: Settings) -> None:
        # In this process: one thread steps and swaps weights, without the memory of a second process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Workers of a cut model: a fork would copy locks that gRPC's threads hold, and never see them released.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if settings.tensor_parallel_size > 1:
            # On a CPU vLLM would give each worker a NUMA node of its own, and refuse where there are fewer.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # not once more for each engine
        take_over_logs("torch", "vllm")
        # At every load it would log that a module without weights got none.
        take_over_logs("vllm.model_executor.model_loader.reload", level="ERROR")
        self._llm = LLMEngine.from_engine_args(_engine_args(spec, settings))
        self._recomputes = settings.in_flight == "keep"
        self._loads = 0
        self._served: set[str] = set()
        self._base: Shapes = {}
        # Every request names this one adapter, also at version 0: what is loaded in its place then holds for those
        # that are running, too.
        self._adapter = LoRARequest("policy", 1, "loaded by `load`") if spec.adapters else None
        if self._adapter:
            self._base = tensor_shapes(spec.model_path.glob("*.safetensors"))
            self._load_adapter(self._adapter, None)
        self._llm.set_weight_version("0")

    def add(self, request_id: str, request: SampleRequest) -> None:
        """Queue a sequence; it joins the running batch at one of the next steps. Raises InvalidInput."""
        try:
            params = _sampling_params(request)
            if request.served:
                self._served.add(request_id)
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt_token_ids), cache_salt=self.salt())
            self._llm.add_request(request_id, prompt, params, lora_request=self._adapter)
        except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
            # Too long, token ids outside the vocabulary, or sampling that vLLM does not do.
            self._served.discard(request_id)
            raise InvalidInput(f"vLLM refuses the request: {error}", code="refused_prompt") from error

    def step(self) -> list[tuple[str, Sample | SampledPart]]:
        """Decode a token of every running sequence; returns those that finished, and parts of those that are served."""
        found: list[tuple[str, Sample | SampledPart]] = []
        for output in self._llm.step():
            if not isinstance(output, RequestOutput):
                continue
            if output.request_id in self._served:
                found.append((output.request_id, replace(part_of(output.outputs[0]), prompt=prompt_of(output))))
                if output.finished:
                    self._served.discard(output.request_id)
            elif output.finished:
                found.append((output.request_id, self._sample(output.outputs[0])))
        return found

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop sequences, finished or not."""
        self._served.difference_update(request_ids)
        self._llm.abort_request(list(request_ids))

    def load(self, paths: Sequence[Path], version: int) -> None:
        """Swap in these weights, or the adapter that they are; running sequences go on."""
        self._llm.sleep(level=0, mode="keep")
        if self._adapter:
            self._load_adapter(self._adapter, adapter_of(paths))
            self._take_up(version)
        else:
            self._update({"paths": [str(path) for path in paths]}, version)

    def receive(self, joined: JoinedBroadcast, version: int) -> None:
        """Swap in the whole weights that a broadcast brings.

        Whatever it raises: the model may be half of each version then, and nothing may run until `load`.
        """
        self._llm.sleep(level=0, mode="keep")
        with forgotten_where_it_fails(self._llm.collective_rpc):
            self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"joined": joined}})
            self._update({}, version)

    def _update(self, update_info: dict[str, list[str]], version: int) -> None:
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info})
        self._llm.collective_rpc("finish_weight_update")
        self._take_up(version)

    def _take_up(self, version: int) -> None:
        """Go on with what was swapped in."""
        self._loads += 1
        if self._recomputes:
            self.reset_prefix_cache()
        self._llm.set_weight_version(str(version))
        self._llm.wake_up(["scheduling"])

    def _load_adapter(self, adapter: LoRARequest, folder: Path | None) -> None:
        """Put the adapter of a folder in the one's place that requests name; None: one that changes nothing."""
        with TemporaryDirectory(prefix="spo-adapter-") as neutral:
            if folder is None:
                folder = Path(neutral)
                write_neutral_adapter(folder, self._base)
            self._llm.add_lora(LoRARequest(adapter.lora_name, adapter.lora_int_id, str(folder), load_inplace=True))

    def salt(self) -> str:
        """What sequences share blocks by that begin now: the same version loaded again is another load."""
        return str(self._loads)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences are preempted and recompute theirs."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def _sample(self, output: CompletionOutput) -> Sample:
        token_ids = tuple(output.token_ids)
        logprobs, spans = output.logprobs, output.weight_versions
        if not isinstance(logprobs, FlatLogprobs) or not spans:
            raise TypeError("vLLM gave no flat log-probs or no weight versions")
        return Sample(
            token_ids=token_ids,
            logprobs=tuple(logprobs.logprobs),
            stopped=output.finish_reason == "stop",
            version_first=int(spans[0].version),
            version_last=int(spans[-1].version),
        )


def part_of(output: CompletionOutput) -> SampledPart:
    """What vLLM reports of a served sequence."""
    spans = output.weight_versions
    pairs = zip(output.token_ids, output.logprobs or (), strict=False)
    return SampledPart(
        text=output.text,
        token_ids=tuple(output.token_ids),
        tokens=tuple(_shown(token_id, likely) for token_id, likely in pairs if likely),
        finish_reason=output.finish_reason or "",
        stop_reason=output.stop_reason if isinstance(output.stop_reason, str) else "",
        version_first=int(spans[0].version) if spans else 0,
        version_last=int(spans[-1].version) if spans else 0,
    )


def prompt_of(output: RequestOutput) -> tuple[ShownToken, ...]:
    """The prompt's tokens by the model itself (temperature 1, no top-p); none where log-probs were not asked for."""
    pairs = zip(output.prompt_token_ids or (), output.prompt_logprobs or (), strict=False)
    return tuple(
        _shown(token_id, likely) if likely else ShownToken(token_id, "", math.nan) for token_id, likely in pairs
    )


def _shown(token_id: int, likely: Mapping[int, Logprob]) -> ShownToken:
    # vLLM puts the sampled token first, and again among the likeliest only if it is one of them.
    sampled = likely[token_id]
    ranked = sorted(likely.items(), key=lambda known: known[1].rank or 0)
    top = tuple(ShownToken(other, known.decoded_token or "", known.logprob) for other, known in ranked)
    return ShownToken(token_id, sampled.decoded_token or "", sampled.logprob, top)


def _grammar(served: ServedSampling) -> StructuredOutputsParams | None:
    return StructuredOutputsParams(structural_tag=served.structural_tag) if served.structural_tag else None


def _sampling_params(request: SampleRequest) -> SamplingParams:
    served = request.served
    if served:
        kind = RequestOutputKind.DELTA if served.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seed,
            frequency_penalty=served.frequency_penalty,
            presence_penalty=served.presence_penalty,
            logprobs=served.top_logprobs,
            prompt_logprobs=served.top_logprobs if served.prompt_logprobs else None,
            stop=list(request.stop),
            ignore_eos=served.ignore_eos,
            stop_token_ids=[] if served.ignore_eos else list(request.end_token_ids),
            output_kind=kind,
            skip_special_tokens=not served.shows_special_tokens,
            structured_outputs=_grammar(served),
        )
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_tokens,
        seed=request.seed,
        # The sampled token's own log-prob. min_tokens stays unset: it would mask the end inside it.
        logprobs=0,
        flat_logprobs=True,
        # Only stop strings need it; the text is made of the tokens afterwards.
        detokenize=bool(request.stop),
        stop=list(request.stop),
        stop_token_ids=list(request.end_token_ids),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def head_sizes() -> tuple[int, ...]:
    """The sizes of attention heads that the engine takes here; empty: all (on a GPU one of its backends does)."""
    return tuple(CPUAttentionBackend.get_supported_head_sizes()) if current_platform.is_cpu() else ()


def device_memory_bytes(settings: Settings) -> tuple[int, ...]:
    """Bytes of each device that the model is cut over; of a CPU what its processes may take."""
    if current_platform.is_cpu():
        return (memory_limit_bytes(),)
    return (int(current_platform.get_device_total_memory()),) * settings.tensor_parallel_size


def is_accelerated() -> bool:
    """Whether the engine computes on no CPU."""
    return not current_platform.is_cpu()


def _engine_args(spec: EngineSpec, settings: Settings) -> EngineArgs:
    on_cpu = current_platform.is_cpu()
    return EngineArgs(
        model=str(spec.model_path),
        # A folder may hold the same model in a format of its maker's too; the trainer reads this one.
        config_format="hf",
        tokenizer_mode="hf",
        dtype=spec.dtype,
        max_model_len=spec.max_tokens,
        max_num_seqs=settings.max_sequences,
        kv_cache_memory_bytes=settings.cache_bytes(on_cpu=on_cpu) or None,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        block_size=CPU_BLOCK_TOKENS if on_cpu else None,
        enforce_eager=on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        enable_prefix_caching=True,
        # The default reports the raw model's log-probs: off by up to 1.8 nats from what was sampled.
        logprobs_mode="processed_logprobs",
        trust_remote_code=False,
        load_format="safetensors",
        use_tqdm_on_load=False,
        # vLLM samples after each part of a prompt and sets the generator back; CPU generators cannot be set back.
        enable_chunked_prefill=False if on_cpu else None,
        max_num_batched_tokens=max(CPU_PREFILL_TOKENS, spec.max_tokens) if on_cpu else None,
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
        **_adapter_args(spec.adapters),
    )


def _adapter_args(room: AdapterRoom | None) -> dict[str, Any]:
    if room is None:
        return {}
    # Only these layers: vLLM would otherwise compute an adapter of nothing for the logits, too.
    layers = sorted(room.layers)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room.rank, "lora_target_modules": layers}
