"""What training costs at real widths: hidden 896, 152,000 words, 4 layers, 2,048 tokens; a layer of 7B, 8,192 tokens.

Ours is the trainer's forward: the last layer in blocks of the vocabulary, layers that run again, packed rows. The
yardsticks compute the same log-probs the way transformers does, from the logits of all tokens widened to float32, and
from logits in chunks of tokens that run again in the backward pass. Memory is what the pass takes above the weights and
their gradients, in a process of its own. All is bfloat16.

Of Qwen2.5-7B it is a whole step of one layer, by the trainer with all that it does around a batch, and by a loop that
one would write by hand: transformers' model whose layer runs again, and AdamW on float32 copies of the weights.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.frame import Row, compare, run
from benchmarks.gpu.shapes import write_shape
from benchmarks.gpu.training import random_rows
from services.trainer.batches import MicroBatch, Minibatch, TrainingSample
from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
from services.trainer.learner import Learner
from services.trainer.ranks import join_ranks
from spo.model.logprobs import ATTENTION, checkpoint_activations, give_logprob_head, token_logprobs
from spo.spec.job_spec import parse_job_spec

HIDDEN, WORDS, LAYERS, TOKENS = 896, 151_936, 4, 2_048
CHUNK = 256
LAYER, LAYER_TOKENS = "7B's layer", 8_192
SECONDS = 1800.0
# Peak bytes per token of the trainer before its last layer came in blocks, by the same measurement.
BYTES_PER_TOKEN_BEFORE = 2.6e6
SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class Cost:
    """Of one forward and backward pass: CPU seconds, and the most bytes above weights and gradients."""

    cpu_seconds: float
    peak_bytes: float


def measure() -> list[Row]:
    """All claims; each way in a process of its own, as what one allocates another would find."""
    return [
        _row("bytes per token, 1 x 2,048", "before: 2.6 MB", "ours", lambda: BYTES_PER_TOKEN_BEFORE, 5.0),
        _row("bytes per token, 1 x 2,048", "transformers' logits", "ours", lambda: _bytes("plain"), 5.0),
        _row("bytes per token, 1 x 2,048", "logits in chunks of tokens", "ours", lambda: _bytes("chunked"), 1.0),
        _cpu("plain", "transformers' logits", 1 / 1.35),
        _cpu("chunked", "logits in chunks of tokens", 1 / 1.35),
        _mixed("bytes", "bytes per token, 16 mixed lengths packed", lambda way: cost(way).peak_bytes / TOKENS),
        _mixed("CPU s", "pass over 16 mixed lengths packed", lambda way: cost(way).cpu_seconds),
        _of_a_layer("step", "CPU s", lambda way: cost(way).cpu_seconds),
        _of_a_layer("bytes per token", "bytes", lambda way: cost(way).peak_bytes / LAYER_TOKENS),
    ]


def _of_a_layer(what: str, unit: str, of: Callable[[str], float]) -> Row:
    return compare(
        f"{LAYER}, 1 x {LAYER_TOKENS:,}, {what}",
        unit,
        "plain loop",
        lambda: of("layer, trainer"),
        lambda: of("layer, plain loop"),
        goal=0.9,
        rounds=1,
        lower_is_better=True,
        warm_up=False,
    )


def _row(name: str, yardstick: str, way: str, peer: Callable[[], float], goal: float) -> Row:
    return compare(
        name, "bytes", yardstick, lambda: _bytes(way), peer, goal=goal, rounds=1, lower_is_better=True, warm_up=False
    )


def _cpu(way: str, yardstick: str, goal: float) -> Row:
    return compare(
        "pass over 1 x 2,048",
        "CPU s",
        yardstick,
        lambda: cost("ours").cpu_seconds,
        lambda: cost(way).cpu_seconds,
        goal=goal,
        rounds=1,
        lower_is_better=True,
        warm_up=False,
    )


def _mixed(unit: str, name: str, of: Callable[[str], float]) -> Row:
    return compare(
        name,
        unit,
        "padded",
        lambda: of("mixed packed"),
        lambda: of("mixed padded"),
        goal=1.0,
        rounds=1,
        lower_is_better=True,
        warm_up=False,
    )


def _bytes(way: str) -> float:
    return cost(way).peak_bytes / TOKENS


@cache
def cost(way: str) -> Cost:
    """What one way takes, in a fresh process: "ours", "plain", "chunked", "mixed packed" or "mixed padded".

    Of the layer: "layer, trainer" or "layer, plain loop".
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(layer_cost if way.startswith("layer") else pass_cost, way).result(SECONDS)


def layer_cost(way: str) -> Cost:
    """The second of two steps on one response; in the first the optimiser's state comes into being."""
    torch.set_num_threads(1)
    rows = random_rows(1, LAYER_TOKENS)
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder:
        write_shape(Path(folder) / "model", LAYER)
        step, close = (_trainer if way == "layer, trainer" else _plain_loop)(Path(folder) / "model", rows)
        found = _second(step)
        flops = 8 * _weights_of(Path(folder) / "model") * LAYER_TOKENS / found.cpu_seconds
        print(
            f"{way}: {flops / 1e9:.1f} GFLOP a CPU second, matrices alone {_matrix_rate() / 1e9:.1f}", file=sys.stderr
        )
        close()
    return found


def _second(step: Callable[[], object]) -> Cost:
    step()
    # Freed memory would hide what the step takes.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with PeakResident() as peak:
        before = time.process_time()
        step()
        seconds = time.process_time() - before
    return Cost(seconds, peak.bytes_above_start)


def _weights_of(model: Path) -> int:
    with safe_open(model / "model.safetensors", framework="pt") as file:
        return sum(int(file.get_tensor(name).numel()) for name in file.keys() if ".layers." in name)  # noqa: SIM118


def _matrix_rate() -> float:
    """FLOP per CPU second of the product of two large matrices."""
    one, other = torch.randn(4096, 4096).bfloat16(), torch.randn(4096, 4096).bfloat16()
    one @ other
    before = time.process_time()
    one @ other
    return 2 * 4096**3 / (time.process_time() - before)


def _trainer(model: Path, rows: list[TrainingSample]) -> tuple[Callable[[], object], Callable[[], None]]:
    ranks = join_ranks(timeout_seconds=60)
    prepare_deepspeed(model.parent)
    document = {
        "model": {"path": str(model), "dtype": "bfloat16", "max_response_tokens": LAYER_TOKENS},
        "algorithm": {"losses": [{"objective": "terminal_squared"}]},
        "trainer": {"batch_size": 1, "zero_stage": 1, "activation_checkpointing": True},
    }
    learner = Learner(ranks, parse_job_spec(document))

    def close() -> None:
        learner.close()
        leave_deepspeed()

    return lambda: learner.learn([Minibatch([MicroBatch(rows)], 1)], 1e-5), close


def _plain_loop(path: Path, rows: list[TrainingSample]) -> tuple[Callable[[], object], Callable[[], None]]:
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, weight_decay=0.0)
    of_row = rows[0].trajectory
    ids_BL = torch.tensor([[*of_row.prompt_token_ids, *of_row.response_token_ids]])

    def step() -> None:
        logprob = plain_logprobs(model, ids_BL, torch.ones_like(ids_BL)).mean()
        (logprob + 1).square().backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)
            master.grad = None

    return step, lambda: None


def pass_cost(way: str) -> Cost:
    """The second of two passes; the first brings gradients and libraries into memory."""
    torch.set_num_threads(1)
    model = qwen_shaped("sdpa" if way in ("plain", "chunked", "mixed padded") else ATTENTION, torch.bfloat16)
    if way in ("plain", "chunked"):
        logprobs: Callable[..., Tensor] = plain_logprobs if way == "plain" else chunked_logprobs
    else:
        give_logprob_head(model)
        checkpoint_activations(model, reentrant=False)
        logprobs = token_logprobs
    ids_BL, mask_BL = batch_of(mixed_lengths() if way.startswith("mixed") else [TOKENS])
    _one_pass(model, logprobs, ids_BL[:1, :64], mask_BL[:1, :64])
    # Freed memory would hide what the pass takes.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with PeakResident() as peak:
        before = time.process_time()
        _one_pass(model, logprobs, ids_BL, mask_BL)
        seconds = time.process_time() - before
    return Cost(seconds, peak.bytes_above_start)


def qwen_shaped(attention: str, dtype: torch.dtype, hidden: int = HIDDEN, words: int = WORDS) -> PreTrainedModel:
    """A random model with the widths of Qwen2.5-0.5B and few layers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=hidden * 4864 // 896,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = Qwen2ForCausalLM._from_config(config, attn_implementation=attention).eval()
    nn.Module.to(model, dtype)
    return model


def mixed_lengths() -> list[int]:
    """Sixteen lengths from short to long, TOKENS in sum."""
    draw = random.Random(0)
    shares = [draw.random() ** 2 + 0.05 for _ in range(16)]
    lengths = [max(8, int(TOKENS * share / sum(shares))) for share in shares]
    return [*lengths[:-1], lengths[-1] + TOKENS - sum(lengths)]


def batch_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random tokens and their mask, padded on the right."""
    ids_BL = torch.randint(5, 1000, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    mask_BL = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return ids_BL, mask_BL


def plain_logprobs(model: nn.Module, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """From the logits of all tokens, widened to float32, as transformers' own loss does."""
    logits_BLV = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits.float()
    loss_BL = nn.functional.cross_entropy(logits_BLV[:, :-1].transpose(1, 2), ids_BL[:, 1:], reduction="none")
    return nn.functional.pad(-loss_BL * mask_BL[:, 1:], (1, 0))


def chunked_logprobs(model: PreTrainedModel, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """From logits of CHUNK tokens at a time that run again in the backward pass, the way chunked losses do."""
    hidden_BLD = model.base_model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).last_hidden_state

    def chosen(hidden_TD: Tensor, tokens_T: Tensor) -> Tensor:
        logits_TV = nn.functional.linear(hidden_TD, model.get_output_embeddings().weight).float()
        return -nn.functional.cross_entropy(logits_TV, tokens_T, reduction="none")

    hidden_TD, tokens_T = hidden_BLD[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten()
    parts = [
        checkpoint(chosen, *given, use_reentrant=False)
        for given in zip(torch.split(hidden_TD, CHUNK), torch.split(tokens_T, CHUNK), strict=True)
    ]
    found_BL = torch.cat(parts).view(len(ids_BL), -1)
    return nn.functional.pad(found_BL * mask_BL[:, 1:], (1, 0))


def _one_pass(model: nn.Module, logprobs: Callable[..., Tensor], ids_BL: Tensor, mask_BL: Tensor) -> None:
    (-logprobs(model, ids_BL, mask_BL).sum() / mask_BL.sum()).backward()  # type: ignore[no-untyped-call]


class PeakResident:
    """The most resident memory while the body runs, over what there was before."""

    def __enter__(self) -> PeakResident:
        self._process = psutil.Process()
        self._start = self._peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def bytes_above_start(self) -> float:
        """Bytes."""
        return float(self._peak - self._start)


if __name__ == "__main__":
    sys.exit(run("real_widths", measure))
