"""One conversation while it is sampled: its tokens in order, whose they are, and what the engine is fed next.

Token in, token out: the tokens that were sampled are kept and fed again as they are, and only what the environment
says is made into tokens. So the policy's next turn begins after exactly the tokens that are trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from services.inference.engine import Sample, SampleRequest
from services.inference.sampling import Draw, turn_seed
from spo.model.chat import ChatFormat
from spo.model.tokenizer import decode_response, encode_observation, opens_reasoning
from spo.v1.environment_service_pb2 import Observation
from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION, Segment
from spo.v1.verdict_pb2 import Verdict

_CUT = "\n[...]\n"


@dataclass(frozen=True)
class TurnRules:
    """What all episodes of a group share: how turns are written, and where an episode is cut."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    end_token_ids: tuple[int, ...]
    top_p: float
    # Tokens of actions and observations together.
    max_tokens: int
    max_turns: int
    max_observation_tokens: int

    def shortened(self, text: str) -> str:
        """An observation's text with its middle left out where it has too many tokens."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) <= self.max_observation_tokens:
            return text
        half = self.max_observation_tokens // 2
        head = self.tokenizer.decode(token_ids[: self.max_observation_tokens - half])
        tail = self.tokenizer.decode(token_ids[len(token_ids) - half :]) if half else ""
        return f"{head}{_CUT}{tail}"


@dataclass(eq=False)
class Episode:
    """One sample of a group. `finished`: it goes on no further; `stopped`: because its environment ended it."""

    rules: TurnRules
    draw: Draw
    prompt_token_ids: tuple[int, ...]
    # Opaque, the environment's own; it is handed back and told to nobody else.
    state: bytes
    verdict: Verdict | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    text: str = ""
    reasoning_characters: int = 0
    turns: int = 0
    version_first: int = 0
    version_last: int = 0
    stopped: bool = False
    finished: bool = False

    def request(self) -> SampleRequest:
        """What the engine is asked for next: the policy's next turn after all that was said."""
        rules = self.rules
        return SampleRequest(
            (*self.prompt_token_ids, *self.token_ids),
            self.draw.temperature,
            rules.top_p,
            rules.max_tokens - len(self.token_ids),
            turn_seed(self.draw.seed, self.turns),
            rules.chat.stop,
            rules.end_token_ids,
        )

    def act(self, sample: Sample) -> str:
        """Take up what was sampled; returns what the environment is told of it: the text after its reasoning.

        An action that was cut, for want of room, ends the episode.
        """
        rules = self.rules
        text = decode_response(rules.tokenizer, sample.token_ids, rules.chat)
        context = (*self.prompt_token_ids, *self.token_ids)
        opened = opens_reasoning(rules.tokenizer, context, rules.chat)
        reasoned = rules.chat.reasoning_length(text, opened=opened)
        self.reasoning_characters = len(self.text) + reasoned if reasoned else 0
        if not self.turns:
            self.version_first = sample.version_first
        self.version_last = sample.version_last
        self.turns += 1
        self._append(SEGMENT_KIND_ACTION, sample.token_ids, sample.logprobs, text)
        self.finished = not sample.stopped
        return text[reasoned:]

    def observe(self, observation: Observation) -> None:
        """Take up what the environment says; ends the episode where it is done, or has no turn or no room left."""
        self.state = observation.state
        if observation.HasField("verdict"):
            self.verdict = observation.verdict
        action = self.segments[-1]
        action.label = observation.label
        if observation.HasField("score"):
            action.score = observation.score
        self.stopped = observation.done
        self.finished = observation.done or self.turns >= self.rules.max_turns
        if not self.finished:
            self._listen(observation)

    def _listen(self, observation: Observation) -> None:
        rules = self.rules
        text = rules.shortened(observation.text)
        token_ids = encode_observation(rules.tokenizer, text, rules.chat, said=self.token_ids)
        # What the policy cannot answer any more is left out: the last segment is always its own.
        if len(self.token_ids) + len(token_ids) >= rules.max_tokens:
            self.finished = True
            return
        self._append(SEGMENT_KIND_OBSERVATION, token_ids, [0.0] * len(token_ids), text)
        self.segments[-1].label = observation.label

    def _append(
        self, kind: int, token_ids: tuple[int, ...] | list[int], logprobs: tuple[float, ...] | list[float], text: str
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.text += text
        self.segments.append(Segment(kind=kind, tokens=len(token_ids), characters=len(text)))  # type: ignore[arg-type]
