"""What clients of OpenAI's API may send, field by field, and what replicas are asked for in consequence."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spo.errors import FieldViolation, InvalidInput
from spo.spec.section import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, TopP
from spo.v1.inference_service_pb2 import ServeRequest

MOST_TOKENS_IN_ALL = 262_144
MOST_CHARACTERS = 1 << 20
MOST_TOOLS = 128
PLAIN_COMPLETION_TOKENS = 16

Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Penalty = Annotated[float, Field(ge=-2, le=2)]

Json = dict[str, object]


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


class CalledFunction(OpenAiPart):
    name: FunctionName
    arguments: Text = ""
    # What the openai package makes of the arguments; they are read themselves.
    parsed_arguments: object = None


class ChatCall(OpenAiPart):
    """A call of a tool that the model made in a turn before."""

    id: str = Field(min_length=1, max_length=200)
    type: Literal["function"] = "function"
    function: CalledFunction
    # As streams number calls, and packages send it back; the order says it.
    index: int | None = Field(default=None, ge=0)


class ChatMessage(OpenAiPart):
    """One turn; of several parts of text it is what they say one after the other."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextContent] = Field(default="", max_length=MOST_CHARACTERS)
    name: str = Field(default="", max_length=64)
    tool_calls: list[ChatCall] = Field(default=[], max_length=MOST_TOOLS)
    tool_call_id: str = Field(default="", max_length=200)
    # As answers have them; without effect.
    refusal: Literal[""] = ""
    annotations: list[Json] = Field(default=[], max_length=0)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def turn(self) -> dict[str, str]:
        """Role and content, as chat templates take them."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class ToolFunction(OpenAiPart):
    """strict: the arguments of a call are held to the schema, where vLLM has a grammar of the model's calls."""

    name: FunctionName
    description: Text = ""
    parameters: Json = Field(default={"type": "object", "properties": {}})
    strict: bool = False


class ChatTool(OpenAiPart):
    type: Literal["function"]
    function: ToolFunction

    @property
    def document(self) -> Json:
        """The tool as OpenAI has it; strict only where it is true."""
        left_out = set() if self.function.strict else {"strict"}
        return {"type": "function", "function": self.function.model_dump(exclude=left_out)}


class ChosenFunction(OpenAiPart):
    name: FunctionName


class ToolChoice(OpenAiPart):
    """The one function that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class StreamOptions(OpenAiPart):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: bool = Field(default=False, description="The usage so far in every chunk, as vLLM has it.")


class AnswerSchema(OpenAiPart):
    """strict and description change nothing: an answer is always held to its schema."""

    name: FunctionName
    schema_: Json = Field(alias="schema")
    description: Text = ""
    strict: bool = True


class ResponseFormat(OpenAiPart):
    """text; json_object: any object; json_schema: what is valid under it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: AnswerSchema | None = None

    @property
    def held_to(self) -> str:
        """What the answer is held to; "": nothing. Raises InvalidInput with a pointer."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refused("/response_format/json_schema", "belongs to the type json_schema")
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return json.dumps({"type": "object"}) if self.type == "json_object" else ""


class NoOps(OpenAiPart):
    """Fields that clients send with the value that changes nothing, or that is a hint; with another it is refused."""

    logit_bias: dict[str, float] = Field(default={}, max_length=0)
    min_p: float = Field(default=0.0, ge=0, le=0)
    min_tokens: Literal[0] = 0
    repetition_penalty: float = Field(default=1.0, ge=1, le=1)
    top_k: Literal[-1, 0] = -1
    safety_identifier: str = Field(default="", max_length=200, description="As user: looked at by nobody.")
    prompt_cache_key: str = Field(default="", max_length=200, description="Prefixes are shared without it.")


class OpenAiRequest(NoOps):
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
    ignore_eos: bool = Field(default=False, description="vLLM's: go on behind the end, up to max_tokens.")
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
        if self.ignore_eos and not self.most_tokens:
            raise refused("/ignore_eos", "goes on up to max_tokens, which is missing")
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
            ignore_eos=self.ignore_eos,
        )


def refused(pointer: str, message: str) -> InvalidInput:
    """The error for one field."""
    violation = FieldViolation(pointer, message)
    return InvalidInput(f"{pointer[1:]}: {message}", code="invalid_request", violations=(violation,))


class ChatRequest(OpenAiRequest):
    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=131_072)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[ChatTool] = Field(default=[], max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    # Without effect.
    functions: list[Json] = Field(default=[], max_length=0)
    function_call: Literal["none", "auto"] = "auto"
    modalities: list[Literal["text"]] = Field(default=["text"], min_length=1, max_length=1)
    service_tier: Literal["auto", "default"] = "auto"
    verbosity: Literal["medium"] = "medium"

    @property
    def most_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def turns(self) -> list[dict[str, str]]:
        """Role and content of each message."""
        return [each.turn for each in self.messages]

    @cached_property
    def shown(self) -> list[Json]:
        """The turns as chat templates take them. Raises InvalidInput with a pointer."""
        return list(conversation(self.messages))

    @property
    def has_tools(self) -> bool:
        """Whether tools are offered, or were called earlier."""
        return bool(self.tools) or any(each.tool_calls or each.role == "tool" for each in self.messages)

    def to_serve(self, run_id: str, version: int) -> ServeRequest:
        """The request as replicas take it. Raises InvalidInput with a pointer."""
        if self.top_logprobs and not self.logprobs:
            raise refused("/top_logprobs", "needs logprobs: true")
        if len({tool.function.name for tool in self.tools}) < len(self.tools):
            raise refused("/tools", "two of them have the same name")
        found = self.sampling(run_id, version)
        found.messages_json = json.dumps(self.shown)
        found.logprobs, found.top_logprobs = self.logprobs, self.top_logprobs
        found.answer_schema_json = self.response_format.held_to if self.response_format else ""
        found.one_call = not self.parallel_tool_calls
        if self.tools and self.tool_choice != "none":
            found.tools_json = json.dumps([tool.document for tool in self.tools])
        if self.tool_choice not in ("none", "auto"):
            found.tool_choice_json = self._forced()
        return found

    def _forced(self) -> str:
        """The call that has to be made, as OpenAI has it."""
        if not isinstance(self.tool_choice, ToolChoice):
            if not self.tools:
                raise refused("/tool_choice", "needs tools")
            return json.dumps(self.tool_choice)
        if self.tool_choice.function.name not in {tool.function.name for tool in self.tools}:
            raise refused("/tool_choice/function/name", "is the name of no tool")
        return self.tool_choice.model_dump_json()


def conversation(messages: Sequence[ChatMessage]) -> Iterator[Json]:
    """The turns as chat templates take them: arguments of calls as objects, results with the name of their function.

    Raises InvalidInput with a pointer to what stands at the wrong message, and to a result that no call asked for.
    """
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        at = f"/messages/{index}"
        turn: Json = {**message.turn}
        if message.role == "tool":
            if message.tool_call_id not in called:
                raise refused(f"{at}/tool_call_id", "must be the id of a call in an earlier message of the assistant's")
            turn |= {"tool_call_id": message.tool_call_id, "name": called[message.tool_call_id]}
        elif message.tool_call_id:
            raise refused(f"{at}/tool_call_id", "belongs to messages of the role tool")
        if message.name not in ("", turn.get("name", "")):
            raise refused(f"{at}/name", "no model is shown who of several speaks")
        if message.tool_calls and message.role != "assistant":
            raise refused(f"{at}/tool_calls", "belong to messages of the role assistant")
        calls = [
            _as_shown(call, f"{at}/tool_calls/{number}/function/arguments")
            for number, call in enumerate(message.tool_calls)
        ]
        called |= {call.id: call.function.name for call in message.tool_calls}
        if calls:
            turn["tool_calls"] = calls
        yield turn


def _as_shown(call: ChatCall, pointer: str) -> Json:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise refused(pointer, "must be a JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


MOST_PROMPTS = 64


class PlainRequest(OpenAiRequest):
    """A completion of a prompt as it is: text, or tokens of the model."""

    prompt: Text | list[Token] | list[Text] | list[list[Token]] = Field(max_length=MOST_CHARACTERS)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    max_tokens: int | None = Field(default=None, ge=0, le=131_072, description="0: with echo, the prompt alone.")
    echo: bool = Field(default=False, description="The prompt, and with logprobs its tokens, before the answer.")
    suffix: Literal[""] = ""
    best_of: int | None = Field(default=None, ge=1, le=16)

    @property
    def most_tokens(self) -> int:
        return PLAIN_COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def each(self) -> list[PlainRequest]:
        """A request for each of several prompts. Raises InvalidInput with a pointer."""
        prompt = self.prompt
        if not isinstance(prompt, list) or len(prompt) < 2 or not isinstance(prompt[0], str | list):
            return [self]
        if self.stream:
            raise refused("/stream", "several prompts are answered whole: stream one")
        if len(prompt) > MOST_PROMPTS:
            raise refused("/prompt", f"at most {MOST_PROMPTS} prompts a request")
        return [self.model_copy(update={"prompt": one}) for one in prompt]

    def to_serve(self, run_id: str, version: int) -> ServeRequest:
        """The request as replicas take it. Raises InvalidInput with a pointer."""
        if self.best_of not in (None, self.n):
            raise refused("/best_of", "is served only where it equals n")
        if self.max_tokens == 0 and not self.echo:
            raise refused("/max_tokens", "0 needs echo: true")
        found = self.sampling(run_id, version)
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if not prompt:
            raise refused("/prompt", "is empty")
        if isinstance(prompt, str):
            found.text = prompt
        else:
            found.token_ids.extend(int(token) for token in prompt if isinstance(token, int))
        found.logprobs, found.top_logprobs = self.logprobs is not None, self.logprobs or 0
        found.echo, found.prompt_alone = self.echo, self.max_tokens == 0
        return found
