"""The reference policy pi0 of a run, with the trainer's forward: log-probs of given responses."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import RunSpecs
from spo.model.folder import inspect_model_folder
from spo.model.logprobs import encode_prompt, encode_response, load_policy, load_tokenizer, response_logprobs
from spo.spec.job_spec import JobSpec, ModelSpec

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """A loaded model; model_hash identifies it across runs."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_hash: str
    tokens_per_forward: int
    lock: threading.Lock

    def encode(self, statement: str, response: str) -> tuple[list[int], list[int]]:
        """Tokens of a prompt and of a response that ends with the end-of-sequence token."""
        return encode_prompt(self.tokenizer, statement), encode_response(self.tokenizer, response)

    def logprobs(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        """log pi0 of each response token, nats; equal sequences are computed once (samples at T = 1 repeat).

        Raises InvalidInput on an empty response or prompt, or a token outside the vocabulary.
        """
        pairs = [(tuple(prompt), tuple(response)) for prompt, response in zip(prompts, responses, strict=True)]
        unique = list(dict.fromkeys(pairs))
        for prompt, response in unique:
            self.check(prompt, response)
        with self.lock:
            found = response_logprobs(
                self.model, [pair[0] for pair in unique], [pair[1] for pair in unique], self.tokens_per_forward
            )
        by_pair = dict(zip(unique, found, strict=True))
        return [by_pair[pair] for pair in pairs]

    def reads(self, response: Sequence[int], text: str) -> bool:
        """Whether the response's tokens decode to the text. Raises InvalidInput on a token outside the vocabulary."""
        self.check((0,), response)
        decoded = self.tokenizer.decode(list(response), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return bool(decoded == text)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, special ones by name."""
        return [str(self.tokenizer.decode([token])) for token in tokens]

    def check(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Raise InvalidInput on an empty sequence, a token outside the vocabulary, or more tokens than positions."""
        if not prompt or not response:
            raise InvalidInput("a sequence needs a prompt and a response", code="empty_sequence")
        vocabulary = int(self.model.config.vocab_size)
        if min(*prompt, *response) < 0 or max(*prompt, *response) >= vocabulary:
            raise InvalidInput(f"a token id is outside the vocabulary of {vocabulary}", code="foreign_tokens")
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest and len(prompt) + len(response) > longest:
            raise InvalidInput(f"a sequence is longer than the model's {longest} positions", code="too_long")


class References:
    """Loads each run's pi0 once and keeps the last one used; runs with the same model share it."""

    def __init__(self, client: RedisClient, tokens_per_forward: int, device: str) -> None:
        self.tokens_per_forward = tokens_per_forward
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.specs = RunSpecs(client)
        self._loaded: dict[tuple[str, str], Reference] = {}
        self._lock = threading.Lock()

    def spec(self, run_id: str) -> JobSpec:
        """The run's spec. Raises NotFound for a run nobody started."""
        return self.specs.of(run_id)

    def of(self, run_id: str) -> Reference:
        """The run's pi0, loaded. Raises NotFound, or InvalidInput when its folder may not be loaded."""
        model = self.spec(run_id).model
        with self._lock:
            key = (model.path, model.dtype)
            if key not in self._loaded:
                self._loaded = {key: self._load(model)}
            return self._loaded[key]

    def _load(self, model: ModelSpec) -> Reference:
        return Reference(
            model=on_device(load_policy(model.path, model.dtype), self.device),
            tokenizer=load_tokenizer(model.path),
            model_hash=inspect_model_folder(model.path).model_hash,
            tokens_per_forward=self.tokens_per_forward,
            lock=threading.Lock(),
        )


def on_device(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """The model, moved to a torch device."""
    # transformers' own `to` is decorated so that its types take no device.
    module: torch.nn.Module = model
    module.to(device)
    return model
