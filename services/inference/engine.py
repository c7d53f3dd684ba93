"""The only file that imports vllm: one in-process engine, driven by one thread.

`add` and `step` give continuous batching; `load` swaps the weights of the live engine. Three rules keep a swap
correct and are all in `load`: the scheduler is paused first (otherwise the engine dies), tensors go through vLLM's
layerwise reload (a bare load_weights is wrong on CPU), and the prefix cache is emptied after (its blocks were
computed with the old weights, and would silently be reused).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import vllm
from safetensors import safe_open
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from services.inference.settings import Settings
from spo.errors import InvalidInput

BACKEND = "safetensors-files"
# vLLM's CPU attention wants multiples of 32; small blocks let short prompts share their prefix.
CPU_BLOCK_TOKENS = 32
CPU_PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample; temperature 0 is greedy."""

    prompt_token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """One finished sequence.

    logprobs: nats per token, of the distribution that was sampled (temperature and top-p applied). token_ids end with
    the end-of-sequence token when `stopped`. The versions are those of the weights behind the first and last token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
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

    @property
    def sampler(self) -> str:
        """What made the samples, as trajectories record it."""
        return f"vllm-{vllm.__version__}/{self.dtype}"

    def fits(self, requested: EngineSpec) -> bool:
        """Whether an engine built for this spec can serve the requested one."""
        same = (self.model_hash, self.dtype) == (requested.model_hash, requested.dtype)
        return same and self.max_tokens >= requested.max_tokens


@dataclass
class WeightFiles(WeightTransferUpdateInfo):
    """Safetensors files that together hold a whole model, with the tensor names of checkpoints."""

    paths: list[str]


class FileWeightTransfer(WeightTransferEngine[WeightTransferInitInfo, WeightFiles]):
    """Loads weights from files into the live model, in each of vLLM's workers."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightFiles

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Files need no rendezvous."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WeightFiles) -> None:
        model: Any = self.model  # every vLLM model has load_weights; nn.Module does not say so
        model.load_weights(_tensors(update_info.paths))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _tensors(paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_tensor(name)


class WorkerExtension:
    """Makes each of vLLM's worker processes import this module, and so register the transfer below."""


WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransfer)


class Engine:
    """A live vLLM engine; not thread-safe: one thread builds it and makes every call."""

    def __init__(self, spec: EngineSpec, settings: Settings) -> None:
        # In this process: one thread steps and swaps weights, without the memory of a second process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._llm = LLMEngine.from_engine_args(_engine_args(spec, settings))
        # After the build, which sets it: vLLM would log every pause.
        logging.getLogger("vllm").setLevel(logging.WARNING)
        self._tokenizer = self._llm.get_tokenizer()
        self._llm.set_weight_version("0")

    def add(self, request_id: str, request: SampleRequest) -> None:
        """Queue a sequence; it joins the running batch at one of the next steps. Raises InvalidInput."""
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seed,
            # The sampled token's own log-prob. min_tokens stays unset: it would mask the end inside it.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            self._llm.add_request(request_id, {"prompt_token_ids": list(request.prompt_token_ids)}, params)
        except (VLLMClientError, ValueError) as error:
            # Too long, or token ids outside the vocabulary.
            raise InvalidInput(f"vLLM refuses the prompt: {error}", code="refused_prompt") from error

    def step(self) -> list[tuple[str, Sample]]:
        """Decode one token of every running sequence; returns the sequences that finished."""
        return [
            (output.request_id, self._sample(output.outputs[0]))
            for output in self._llm.step()
            if isinstance(output, RequestOutput) and output.finished
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop sequences, finished or not."""
        self._llm.abort_request(list(request_ids))

    def load(self, paths: Sequence[Path], version: int) -> None:
        """Swap in the weights of these files; running sequences go on with them, their prefixes recomputed."""
        self._llm.sleep(level=0, mode="keep")
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", kwargs={"update_info": {"paths": [str(path) for path in paths]}})
        self._llm.collective_rpc("finish_weight_update")
        self.reset_prefix_cache()
        self._llm.set_weight_version(str(version))
        self._llm.wake_up(["scheduling"])

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
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            stopped=output.finish_reason == "stop",
            version_first=int(spans[0].version),
            version_last=int(spans[-1].version),
        )


def _engine_args(spec: EngineSpec, settings: Settings) -> EngineArgs:
    on_cpu = current_platform.is_cpu()
    return EngineArgs(
        model=str(spec.model_path),
        dtype=spec.dtype,
        max_model_len=spec.max_tokens,
        max_num_seqs=settings.max_sequences,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes or None,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        block_size=CPU_BLOCK_TOKENS if on_cpu else None,
        enforce_eager=on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        enable_prefix_caching=True,
        # The default reports the raw model's log-probs: off by up to 1.8 nats from what was sampled.
        logprobs_mode="processed_logprobs",
        trust_remote_code=False,
        load_format="safetensors",
        # vLLM samples after each part of a prompt and sets the generator back; CPU generators cannot be set back.
        enable_chunked_prefill=False if on_cpu else None,
        max_num_batched_tokens=max(CPU_PREFILL_TOKENS, spec.max_tokens) if on_cpu else None,
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=f"{__name__}.{WorkerExtension.__name__}",
    )
