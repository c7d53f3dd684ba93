"""The reference policy pi0 of a run and its later versions, with the trainer's forward: log-probs of given
responses.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from socket import gethostname
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from services.value_estimation.settings import Settings
from spo import redis_keys
from spo.errors import FieldViolation, IntegrityError, InvalidInput, NotFound, NotReady, SpoError
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import RunSpecs
from spo.messaging.streams.recovery import WorkDeaths
from spo.model.chat import USUAL, ChatFormat, action_mask, branch_starts, segment_faults
from spo.model.folder import inspect_model_folder, read_tensors
from spo.model.logprobs import add_adapter, is_packed, length_buckets, load_policy, response_logprobs, take_adapter
from spo.model.tokenizer import (
    decode_response,
    decode_text,
    encode_prompt,
    encode_response,
    load_tokenizer,
    opens_reasoning,
    without_end,
)
from spo.observability import get_logger, is_out_of_memory, memory_limit_bytes
from spo.spec.job_spec import JobSpec, LoraSpec
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.trajectory_pb2 import Segment
from spo.weights.model_folders import MadeModels
from spo.weights.store import StoredVersion, WeightStore

log = get_logger("reference")

Tokens = tuple[int, ...]

# A model stays loaded for this many times what its load took, within a limit, while another is asked for; less where
# nobody uses it.
TURN_PER_LOAD_SECONDS = 5.0
MAX_TURN_SECONDS = 30.0
IDLE_SECONDS = 1.0
OUT_OF_MEMORY_SECONDS = 5.0
# Who waits for the model looks this often whether the caller is still there.
TURN_LOOK_SECONDS = 0.5

REFERENCE_VERSION = 0


@dataclass(frozen=True)
class Reference:
    """A loaded model as one run uses it; model_hash identifies it across runs."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_hash: str
    tokens_per_forward: int
    lock: threading.Lock
    chat: ChatFormat = USUAL

    def encode_response(self, text: str, *, ended: bool = True) -> list[int]:
        """Tokens of a response, with what ends it where it has ended; it must hold no stop string."""
        return encode_response(self.tokenizer, text, self.chat, ended=ended)

    def encode_prompt(self, statement: str) -> list[int]:
        """Tokens of a prompt."""
        return encode_prompt(self.tokenizer, statement, self.chat)

    def reasoning_length(self, prompt: Sequence[int], response: str) -> int:
        """How many characters of a response to the prompt's tokens are reasoning."""
        opened = opens_reasoning(self.tokenizer, prompt, self.chat)
        return self.chat.reasoning_length(response, opened=opened)

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        segments: Sequence[Sequence[Segment]] | None = None,
    ) -> list[list[float]]:
        """log pi0 of each response token, nats; of a conversation's observations 0, and nothing is computed.

        segments: of each response; None: none has any. Equal sequences are computed once (samples at T = 1 repeat).
        Raises InvalidInput on an empty response or prompt, a token outside the vocabulary, or segments that are not
        the response's.
        """
        found: list[list[float]] = [[] for _ in responses]
        for by_place in self.scored(prompts, responses, segments):
            for place, logprobs in by_place.items():
                found[place] = logprobs
        return found

    def scored(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        segments: Sequence[Sequence[Segment]] | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Iterator[dict[int, list[float]]]:
        """As `logprobs`, a forward at a time: what is known after it, by the responses' places.

        Other callers have their forwards in between. Nothing more is computed once `wanted` says no: NotReady (code
        "caller_gone").
        """
        turns = segments if segments is not None else [()] * len(responses)
        places = defaultdict(list)
        for place, sequence in enumerate(zip(prompts, responses, turns, strict=True)):
            places[_key(*sequence)].append(place)
        for key in places:
            self.check(key.prompt, key.response, key.starts)
        for by_key in self._forwards(list(places), wanted):
            yield {place: logprobs for key, logprobs in by_key.items() for place in places[key]}

    def _forwards(
        self, keys: Sequence[SequenceKey], wanted: Callable[[], bool]
    ) -> Iterator[dict[SequenceKey, list[float]]]:
        """With fewer tokens at a time where memory runs out. Raises InvalidInput (code "value_out_of_memory")."""
        tokens, left = self.tokens_per_forward, list(keys)
        while left:
            lengths = [len(key.prompt) + len(key.response) for key in left]
            try:
                rows = next(length_buckets(lengths, tokens, packed=is_packed(self.model)))
                batch = [left[row] for row in rows]
                found = self._forward(batch, tokens, wanted)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if tokens <= max(lengths):
                    raise InvalidInput(
                        f"a sequence of {max(lengths)} tokens does not fit in memory beside the reference: {error}",
                        code="value_out_of_memory",
                    ) from error
                log.warning("a forward ran out of memory; it is tried with half the tokens", tokens=tokens)
                tokens //= 2
                torch.cuda.empty_cache()
                continue
            yield dict(zip(batch, found, strict=True))
            done = set(rows)
            left = [key for row, key in enumerate(left) if row not in done]

    def _forward(self, keys: Sequence[SequenceKey], tokens: int, wanted: Callable[[], bool]) -> list[list[float]]:
        """One forward, in its turn among those of other callers. Raises NotReady (code "caller_gone")."""
        while not self.lock.acquire(timeout=TURN_LOOK_SECONDS):
            _require(wanted)
        try:
            _require(wanted)
            return response_logprobs(
                self.model,
                [key.prompt for key in keys],
                [key.response for key in keys],
                tokens,
                [key.trained for key in keys],
                [key.starts for key in keys],
            )
        finally:
            self.lock.release()

    def reads(self, response: Sequence[int], text: str) -> bool:
        """Whether the response's tokens read as the text. Raises InvalidInput on a token outside the vocabulary."""
        self.check((0,), response)
        return decode_response(self.tokenizer, response, self.chat) == self.without_end(text)

    def without_end(self, text: str) -> str:
        """A response's text without the name of a token that ends it."""
        return without_end(self.tokenizer, text, self.chat)

    def read(self, tokens: Sequence[int]) -> str:
        """The text of a conversation's tokens, without special ones. Raises InvalidInput on an unknown token."""
        self.check((0,), tokens)
        return decode_text(self.tokenizer, tokens, self.chat)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, special ones by name."""
        return [str(self.tokenizer.decode([token])) for token in tokens]

    def check(self, prompt: Sequence[int], response: Sequence[int], starts: Sequence[int] = ()) -> None:
        """Raise InvalidInput on an empty sequence, a token outside the vocabulary, or more tokens than positions.

        starts: of the response's branches after the first; each has the positions for itself.
        """
        if not prompt or not response:
            raise InvalidInput("a sequence needs a prompt and a response", code="empty_sequence")
        vocabulary = int(self.model.config.vocab_size)
        if min(*prompt, *response) < 0 or max(*prompt, *response) >= vocabulary:
            raise InvalidInput(f"a token id is outside the vocabulary of {vocabulary}", code="foreign_tokens")
        longest = getattr(self.model.config, "max_position_embeddings", None)
        ends = (-len(prompt), *starts, len(response))
        if longest and max(end - start for start, end in pairwise(ends)) > longest:
            raise InvalidInput(f"a sequence is longer than the model's {longest} positions", code="too_long")


class SequenceKey(NamedTuple):
    """What log-probs depend on; trained: which response tokens are wanted, None: all. starts: of further branches."""

    prompt: Tokens
    response: Tokens
    trained: tuple[bool, ...] | None
    starts: tuple[int, ...]


def _require(wanted: Callable[[], bool]) -> None:
    if not wanted():
        raise NotReady("the caller has gone", code="caller_gone")


def _key(prompt: Sequence[int], response: Sequence[int], segments: Sequence[Segment]) -> SequenceKey:
    """Raises InvalidInput where the segments are not the response's."""
    faults = segment_faults(segments, len(response), None)
    if faults:
        violations = tuple(FieldViolation(pointer, reason) for pointer, reason in faults)
        raise InvalidInput("the segments are not the response's", code="unusable_trajectory", violations=violations)
    trained = tuple(map(bool, action_mask(segments, len(response)))) if segments else None
    return SequenceKey(tuple(prompt), tuple(response), trained, branch_starts(segments))


@dataclass(frozen=True)
class ModelKey:
    """What two runs must have in common to share one loaded pi0: the trainer's forward follows from it."""

    path: str
    dtype: str
    packing: bool


class References:
    """Keeps one pi0 loaded; runs with the same model share it.

    Runs of different models take turns, each long enough to be worth the load that it cost: what waits meanwhile is
    served together.
    """

    def __init__(
        self,
        client: RedisClient,
        tokens_per_forward: int,
        device: str,
        port: int = 0,
        here: Callable[[str], Path] = Path,
    ) -> None:
        """port: with the host, what tells this replica from others and is the same after a restart.

        here: brings the folder of a model's path to this machine.
        """
        self.here = here
        self.place = f"{gethostname()}:{port}"
        self._deaths = WorkDeaths(
            client, redis_keys.reference_deaths, "value-estimation", code="kills_value_estimation"
        )
        self.tokens_per_forward = tokens_per_forward
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.specs = RunSpecs(client)
        self._loaded: dict[ModelKey, Reference] = {}
        self._turns = threading.Condition()
        self._turn_ends = self._used_at = 0.0

    @classmethod
    def as_told(cls, client: RedisClient, settings: Settings) -> References:
        """As the process is told."""
        models = MadeModels(settings.state_place, settings.state_path)
        return cls(client, settings.tokens_per_forward, settings.device, settings.port, models.here)

    def report(self, request: HeartbeatRequest) -> None:
        """Fill in the memory of the device that models are loaded on; of a CPU what this process may take."""
        request.accelerated = self.device != "cpu"
        request.device_memory_bytes.append(
            int(torch.cuda.get_device_properties(torch.device(self.device)).total_memory)
            if request.accelerated
            else memory_limit_bytes()
        )

    def spec(self, run_id: str) -> JobSpec:
        """The run's spec. Raises NotFound for a run nobody started."""
        return self.specs.of(run_id)

    def of(self, run_id: str) -> Reference:
        """The run's pi0, loaded; waits at most MAX_TURN_SECONDS for the turn of another model to end.

        Raises NotFound, or InvalidInput when its folder may not be loaded.
        """
        spec = self.spec(run_id)
        key = ModelKey(spec.model.path, spec.model.dtype, packing=spec.trainer.packing)
        with self._turns:
            while key not in self._loaded:
                wait = min(self._turn_ends, self._used_at + IDLE_SECONDS) - time.monotonic()
                if wait <= 0 or not self._loaded:
                    self._switch(key)
                else:
                    self._turns.wait(wait)
            self._used_at = time.monotonic()
            return replace(self._loaded[key], chat=spec.model.chat_format)

    def _switch(self, key: ModelKey) -> None:
        began = time.monotonic()
        # The one before goes first: a device that holds a model has no room for two.
        self._loaded = {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._loaded = {key: self._load(key)}
        loaded = self._used_at = time.monotonic()
        self._turn_ends = loaded + min(MAX_TURN_SECONDS, TURN_PER_LOAD_SECONDS * (loaded - began))
        self._turns.notify_all()

    def _load(self, model: ModelKey) -> Reference:
        """Raises InvalidInput (code "kills_value_estimation") once it has killed this replica too often."""
        with self._deaths.during(f"loading {model} on {self.place}", ends_process=True):
            try:
                return self._read(model)
            except SpoError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    # Whoever else is short of memory may be about to give some back.
                    time.sleep(OUT_OF_MEMORY_SECONDS)
                    raise
                # Of an outage nobody dies.
                raise NotReady(f"the reference {model.path} cannot be loaded: {error}") from error

    def _read(self, model: ModelKey) -> Reference:
        self.here(model.path)
        return Reference(
            model=on_device(load_policy(model.path, model.dtype, packing=model.packing), self.device),
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


class Policies:
    """Loads one version at a time and keeps the last one used."""

    def __init__(self, references: References, store: WeightStore) -> None:
        self.references = references
        self.store = store
        self._loaded: dict[tuple[str, int], Reference] = {}
        self._lock = threading.Lock()

    def newest(self, run_id: str) -> int:
        """The newest version of a run that is intact; 0, pi0 itself, where there is none. Damaged ones are logged."""
        for version in reversed(self.store.versions(run_id)):
            try:
                self.of(run_id, version)
                return version
            except IntegrityError as error:
                log.warning("a damaged version is passed over", run=run_id, version=version, reason=error.message)
        return REFERENCE_VERSION

    def of(self, run_id: str, version: int) -> Reference:
        """The policy of a version. Raises NotFound when it is not kept, IntegrityError when it is damaged."""
        reference = self.references.of(run_id)
        if version == REFERENCE_VERSION:
            return reference
        with self._lock:
            key = (run_id, version)
            if key not in self._loaded:
                self._loaded = {}
                self._loaded = {key: self._load(run_id, version, reference)}
            return self._loaded[key]

    def _load(self, run_id: str, version: int, reference: Reference) -> Reference:
        if version < REFERENCE_VERSION:
            raise NotFound(f"run {run_id} has no weight version {version}", code="unknown_version")
        weights = self.store.open(run_id, version)
        spec = self.references.spec(run_id)
        lora = spec.model.lora
        policy = _adapted(reference, lora, spec.seed, weights) if lora else _whole(spec, weights)
        return Reference(
            model=on_device(policy, self.references.device),
            tokenizer=reference.tokenizer,
            model_hash=weights.manifest_digest,
            tokens_per_forward=reference.tokens_per_forward,
            lock=threading.Lock(),
            chat=reference.chat,
        )


def _whole(spec: JobSpec, weights: StoredVersion) -> PreTrainedModel:
    policy = load_policy(spec.model.path, spec.model.dtype, packing=spec.trainer.packing)
    state = {name: tensor for path in weights.files for name, tensor in read_tensors(path).items()}
    found = policy.load_state_dict(state, strict=False)
    tied = set(getattr(policy, "_tied_weights_keys", None) or ())
    if found.unexpected_keys or set(found.missing_keys) - tied:
        raise IntegrityError(f"{weights.uri} is not of the model {spec.model.path}")
    return policy


def _adapted(reference: Reference, lora: LoraSpec, seed: int, weights: StoredVersion) -> PreTrainedModel:
    """The reference's own weights again, not copied, with the version's adapter beside them."""
    tensors = (*reference.model.parameters(), *reference.model.buffers())
    policy = deepcopy(reference.model, {id(tensor): tensor for tensor in tensors})
    add_adapter(policy, lora.peft_options(), seed=seed)
    take_adapter(policy, weights.files)
    return policy
