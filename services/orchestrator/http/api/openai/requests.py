"""Requests in OpenAI's form, as far as they are served; what is not is refused by name, never left out silently."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spo.errors import FieldViolation, InvalidInput
from spo.spec.section import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, TopP
from spo.v1.inference_service_pb2 import ServeRequest

MOST_TOKENS_IN_ALL = 262_144
MOST_CHARACTERS = 1 << 20
PLAIN_COMPLETION_TOKENS = 16

Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class OpenAiPart(BaseModel):
    """Unknown fields are refused; null is as good as absent, as OpenAI has it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def null_is_absent(cls, given: object) -> object:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class TextContent(OpenAiPart):
    type: Literal["text"]
    text: Text


class ChatMessage(OpenAiPart):
    """One turn; of several parts of text it is what they say one after the other."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextContent] = Field(default="", max_length=MOST_CHARACTERS)
    name: str = Field(default="", max_length=64)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(OpenAiPart):
    include_usage: bool = False


class TextFormat(OpenAiPart):
    type: Literal["text"]


class OpenAiRequest(OpenAiPart):
    """What chats and plain completions share."""

    model: str = Field(min_length=1, max_length=200)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1, le=131_072)
    temperature: float = Field(default=1.0, ge=0, le=HIGHEST_TEMPERATURE)
    top_p: TopP = 1.0
    n: int = Field(default=1, ge=1, le=16)
    stop: Stop | list[Stop] = Field(default=[], max_length=1000)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    user: str = Field(default="", max_length=200)
    store: bool = Field(default=False, description="Capture this completion as experience.")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        default={}, max_length=16
    )

    @property
    def most_tokens(self) -> int:
        """0: as many as there is room for."""
        return self.max_tokens or 0

    def sampling(self, run_id: str, version: int) -> ServeRequest:
        """The request as replicas take it, without its prompt. Raises InvalidInput with a pointer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > 4:
            raise refused("/stop", "at most 4 stop sequences")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise refused("/temperature", f"0, or at least {LOWEST_TEMPERATURE:g}")
        if self.most_tokens * self.n > MOST_TOKENS_IN_ALL:
            raise refused("/max_tokens", f"times n it is more than {MOST_TOKENS_IN_ALL}")
        return ServeRequest(
            run_id=run_id,
            policy_version=version,
            samples=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.most_tokens,
            seed=secrets.randbits(62) if self.seed is None else self.seed % 2**63,
            stop=stops,
            stream=self.stream,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
        )


class ChatRequest(OpenAiRequest):
    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=131_072)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    response_format: TextFormat | None = None

    @property
    def most_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def turns(self) -> list[dict[str, str]]:
        """Role and content of each message, as chat templates take them."""
        names = {"developer": "system"}
        return [{"role": names.get(each.role, each.role), "content": each.text} for each in self.messages]

    def to_serve(self, run_id: str, version: int) -> ServeRequest:
        """The request as replicas take it. Raises InvalidInput with a pointer."""
        if self.top_logprobs and not self.logprobs:
            raise refused("/top_logprobs", "needs logprobs: true")
        found = self.sampling(run_id, version)
        found.messages_json = json.dumps(self.turns)
        found.logprobs, found.top_logprobs = self.logprobs, self.top_logprobs
        return found


class PlainRequest(OpenAiRequest):
    """A completion of a prompt as it is: text, or tokens of the model."""

    prompt: Text | list[Token] | list[Text] | list[list[Token]] = Field(max_length=MOST_CHARACTERS)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] = False
    best_of: int | None = Field(default=None, ge=1, le=16)

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or PLAIN_COMPLETION_TOKENS

    def to_serve(self, run_id: str, version: int) -> ServeRequest:
        """The request as replicas take it. Raises InvalidInput with a pointer."""
        if self.best_of not in (None, self.n):
            raise refused("/best_of", "is served only where it equals n")
        found = self.sampling(run_id, version)
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise refused("/prompt", "one prompt a request")
            prompt = prompt[0]
        if not prompt:
            raise refused("/prompt", "is empty")
        if isinstance(prompt, str):
            found.text = prompt
        else:
            found.token_ids.extend(int(token) for token in prompt if isinstance(token, int))
        found.logprobs, found.top_logprobs = self.logprobs is not None, self.logprobs or 0
        return found


def refused(pointer: str, message: str) -> InvalidInput:
    """The error for one field."""
    violation = FieldViolation(pointer, message)
    return InvalidInput(f"{pointer[1:]}: {message}", code="invalid_request", violations=(violation,))
