"""OpenAI's Responses and Anthropic's Messages in the terms of a chat: what is asked, and how the answer is written.

Both are translated into the chat that the policy is asked for, and its answer back; nothing else differs. Tools that a
provider would run itself, such as a search of the web, are left out of the prompt and named in a header of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError

from services.orchestrator.container import ContextDep, PrincipalDep
from services.orchestrator.http.errors import anthropic_error, error_document
from services.orchestrator.http.openai import WHOLE, Choice, OpenAiAnswer, ServedCompletion
from services.orchestrator.http.openai_requests import ChatRequest, Json, OpenAiPart, Text, refused
from spo.errors import FieldViolation, InvalidInput, SpoError
from spo.v1.inference_service_pb2 import ServedPart

router = APIRouter(prefix="/v1", tags=["serving"])

LEFT_OUT = "x-spo-left-out"
# Changes with every request of Claude Code: no prefix would ever be the same.
VOLATILE = "x-anthropic-billing-header:"


class ResponsesRequest(OpenAiPart):
    """A request of OpenAI's Responses API. Nothing is kept for a next one: all of the input is sent each time."""

    # Hints, and what only a provider acts on: taken and left alone.
    store: object = None
    metadata: object = None
    reasoning: object = None
    include: object = None
    truncation: object = None
    user: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None
    service_tier: object = None
    client_metadata: object = None
    stream_options: object = None
    max_tool_calls: object = None
    top_logprobs: Literal[0] = 0

    model: str = Field(min_length=1, max_length=200)
    input: Text | list[Json] = Field(max_length=1 << 20)
    instructions: Text | None = None
    tools: list[Json] = Field(default=[], max_length=512)
    tool_choice: Json | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=131_072)
    temperature: float | None = None
    top_p: float | None = None
    text: Json | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None

    @property
    def left_out(self) -> list[str]:
        """Tools that the provider would run."""
        return [str(tool.get("type")) for tool in self.tools if tool.get("type") != "function"]

    def chat(self) -> ChatRequest:
        """The chat that it stands for. Raises InvalidInput with a pointer."""
        if self.previous_response_id:
            raise refused("/previous_response_id", "responses are not kept: send the whole input")
        items: list[Json] = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        turns: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for place, item in enumerate(items):
            _add_input(turns, item, f"/input/{place}")
        tools = [tool for tool in self.tools if tool.get("type") == "function"]
        names = ("name", "description", "parameters", "strict")
        shown = [
            {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
            for tool in tools
        ]
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        asked: Json = {
            "model": self.model,
            "messages": turns,
            "tools": shown,
            "tool_choice": choice if tools else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "response_format": _format_of(self.text or {}),
        }
        return _validated(asked, "input")


def _add_input(turns: list[Json], item: Json, at: str) -> None:
    """Add an item of the input; calls belong to the turn of the assistant's that they follow."""
    match item.get("type", "message"):
        case "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            turns.append({"role": role, "content": _text_of(item.get("content"), f"{at}/content")})
        case "function_call":
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls = turns[-1].setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        case "function_call_output":
            content = _text_of(item.get("output"), f"{at}/output")
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        case "reasoning":
            pass
        case other:
            raise refused(f"{at}/type", f"{str(other)[:100]} is not read")


def _format_of(text: Json) -> Json | None:
    form = text.get("format")
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return None
    if form["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {name: form.get(name) for name in ("name", "schema")}}
    return {"type": form["type"]}


class MessagesRequest(OpenAiPart):
    """A request of Anthropic's Messages API."""

    # Hints, and what only a provider acts on: taken and left alone.
    metadata: object = None
    thinking: object = None
    context_management: object = None
    output_config: object = None
    service_tier: object = None
    top_k: object = None
    cache_control: object = None
    inference_geo: object = None

    model: str = Field(min_length=1, max_length=200)
    messages: list[Json] = Field(min_length=1, max_length=1000)
    max_tokens: int = Field(ge=1, le=131_072)
    system: Text | list[Json] = ""
    tools: list[Json] = Field(default=[], max_length=512)
    tool_choice: Json | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1000)]] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = None
    stream: bool | None = None

    @property
    def left_out(self) -> list[str]:
        """Tools that the provider would run."""
        return [str(tool["type"]) for tool in self.tools if tool.get("type", "custom") != "custom"]

    def chat(self) -> ChatRequest:
        """The chat that it stands for. Raises InvalidInput with a pointer."""
        blocks = self.system if isinstance(self.system, list) else [{"type": "text", "text": self.system}]
        kept = [block for block in blocks if not str(block.get("text", "")).startswith(VOLATILE)]
        system = _text_of(kept, "/system")
        turns: list[Json] = [{"role": "system", "content": system}] if system else []
        for place, message in enumerate(self.messages):
            turns += _turns_of(message, f"/messages/{place}")
        tools = [tool for tool in self.tools if tool.get("type", "custom") == "custom"]
        choice = self.tool_choice or {}
        kinds = {"any": "required", "auto": "auto", "none": "none"}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        asked: Json = {
            "model": self.model,
            "messages": turns,
            "max_completion_tokens": self.max_tokens,
            "tools": [{"type": "function", "function": _function_of(tool)} for tool in tools],
            "tool_choice": (named if choice.get("type") == "tool" else kinds.get(str(choice.get("type"))))
            if tools
            else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
        }
        return _validated(asked, "messages")


def _function_of(tool: Json) -> Json:
    found = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return found | ({"strict": True} if tool.get("strict") else {})


def _turns_of(message: Json, at: str) -> Iterator[Json]:
    """The turns of one message: results of tools before what is said beside them, calls beside what is said."""
    content, role = message.get("content"), message.get("role")
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks = cast("list[Json]", given or [])
    said: list[Json] = []
    calls: list[Json] = []
    for place, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                said.append(block)
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                text = _text_of(block.get("content"), f"{at}/content/{place}/content")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            case "thinking" | "redacted_thinking":
                pass
            case other:
                raise refused(f"{at}/content/{place}/type", f"{str(other)[:100]} is not read")
    if said or calls or not blocks:
        turn: Json = {"role": role, "content": _text_of(said, at)}
        yield turn | ({"tool_calls": calls} if calls else {})


def _text_of(content: object, at: str) -> str:
    """The text of content that is a text or parts of it. Raises InvalidInput with a pointer to what is none."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for place, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise refused(f"{at}/{place}", "only text is read")
        texts.append(text)
    return "".join(texts)


def _validated(asked: Json, name: str) -> ChatRequest:
    try:
        return ChatRequest.model_validate({key: value for key, value in asked.items() if value is not None})
    except ValidationError as error:
        faults = tuple(
            FieldViolation("/" + "/".join(map(str, fault["loc"])).replace("messages", name, 1), fault["msg"])
            for fault in error.errors()
        )
        raise InvalidInput("the request is not valid", code="invalid_request", violations=faults) from None


def typed_event(document: Json) -> bytes:
    """One server-sent event, named by its type."""
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return f"event: {document['type']}\ndata: {body}\n\n".encode()


@dataclass
class ResponsesAnswer(OpenAiAnswer):
    """The answer as OpenAI's Responses API writes it: items of output, a message and calls."""

    dialect: ClassVar[str] = "responses"
    _number: int = field(default=0, init=False)

    def document(self) -> Json:
        """The whole response."""
        return self._response(self._output())

    def opening(self) -> bytes:
        """That it has begun, and its message."""
        begun = self._response([], status="in_progress")
        message = {**self._message(""), "status": "in_progress", "content": []}
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=message)
            + self._event("response.content_part.added", **self._at(), part=_output_text(""))
        )

    def chunk(self, part: ServedPart) -> bytes:
        """More of the message's text."""
        return (
            self._event("response.output_text.delta", **self._at(), delta=part.text, logprobs=[]) if part.text else b""
        )

    def closing(self, *, include_usage: bool) -> bytes:
        """The message whole, the calls, and the end."""
        text, (message, *calls) = self.choices[0].text, self._output(always=True)
        events = [
            self._event("response.output_text.done", **self._at(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._at(), part=_output_text(text)),
            self._event("response.output_item.done", output_index=0, item=message),
        ]
        for index, call in enumerate(calls, 1):
            at: Json = {"output_index": index, "item_id": call["id"]}
            begun = {**call, "status": "in_progress", "arguments": ""}
            events += [
                self._event("response.output_item.added", output_index=index, item=begun),
                self._event("response.function_call_arguments.delta", **at, delta=call["arguments"]),
                self._event(
                    "response.function_call_arguments.done", **at, name=call["name"], arguments=call["arguments"]
                ),
                self._event("response.output_item.done", output_index=index, item=call),
            ]
        whole = self._response([message, *calls])
        return b"".join(events) + self._event(f"response.{whole['status']}", response=whole)

    def failure(self, error: SpoError) -> bytes:
        """What the client is told of an answer that breaks off."""
        found = error_document(error, 500)["error"]
        assert isinstance(found, dict)
        return self._event("error", code=found.get("code"), message=found["message"], param=None)

    def _at(self) -> Json:
        return {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return typed_event({"type": kind, "sequence_number": self._number - 1, **fields})

    def _message(self, text: str) -> Json:
        content = [_output_text(text)]
        return {
            "type": "message", "id": f"msg_{self.id}", "status": self._status, "role": "assistant", "content": content
        }  # fmt: skip

    @property
    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _output(self, *, always: bool = False) -> list[Json]:
        (choice,) = self.choices
        calls = [
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
            for call in _calls_of(choice)
        ]
        # A stream has begun its message before it knew that there was nothing but calls.
        return [*([self._message(choice.text)] if always or choice.text or not calls else []), *calls]

    def _response(self, output: Sequence[Json], status: str = "") -> Json:
        status = status or self._status
        usage = self.usage()
        used = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": f"resp_{self.id}", "object": "response", "created_at": self.created, "model": self.model,
            "status": status, "error": None, "instructions": None, "metadata": {}, "output": list(output),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "parallel_tool_calls": self.most_calls > 1, "tool_choice": "auto", "tools": [], "temperature": None,
            "top_p": None, "store": False, "previous_response_id": None,
            "usage": None if status == "in_progress" else used,
        }  # fmt: skip


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _calls_of(choice: Choice) -> list[dict[str, Any]]:
    return [dict(call) for call in choice.calls]


@dataclass
class MessagesAnswer(OpenAiAnswer):
    """The answer as Anthropic's Messages API writes it: blocks of text and of use of tools."""

    dialect: ClassVar[str] = "messages"

    def document(self) -> Json:
        """The whole message."""
        (choice,) = self.choices
        uses: list[Json] = [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(call["function"]["arguments"]),
            }
            for call in _calls_of(choice)
        ]
        text = [{"type": "text", "text": choice.text}] if choice.text or not uses else []
        return {**self._head_of_message(), "content": [*text, *uses], **self._end(), "usage": self._used()}

    def opening(self) -> bytes:
        """That it has begun, and its text."""
        nothing = {"input_tokens": len(self.prompt_token_ids), "output_tokens": 0}
        begun = {**self._head_of_message(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": nothing}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return typed_event({"type": "message_start", "message": begun}) + typed_event(block)

    def chunk(self, part: ServedPart) -> bytes:
        """More text."""
        return _delta(0, {"type": "text_delta", "text": part.text}) if part.text else b""

    def closing(self, *, include_usage: bool) -> bytes:
        """The end of the text, the use of tools, and the end."""
        events = [typed_event({"type": "content_block_stop", "index": 0})]
        for index, call in enumerate(_calls_of(self.choices[0]), 1):
            use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            arguments = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            events += [
                typed_event({"type": "content_block_start", "index": index, "content_block": use}),
                _delta(index, arguments),
                typed_event({"type": "content_block_stop", "index": index}),
            ]
        events += [
            typed_event({"type": "message_delta", "delta": self._end(), "usage": self._used()}),
            typed_event({"type": "message_stop"}),
        ]
        return b"".join(events)

    def failure(self, error: SpoError) -> bytes:
        """What the client is told of an answer that breaks off."""
        return typed_event(anthropic_error(error))

    def _head_of_message(self) -> Json:
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model}

    def _end(self) -> Json:
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(self.choices[0].finish_reason, "end_turn"), "stop_sequence": None}

    def _used(self) -> Json:
        usage = self.usage()
        return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _delta(index: int, delta: Json) -> bytes:
    return typed_event({"type": "content_block_delta", "index": index, "delta": delta})


async def answered(completion: ServedCompletion, asked: ResponsesRequest | MessagesRequest) -> Response:
    """What a completion answers in the form of what was asked."""
    completion.form = ResponsesAnswer if isinstance(asked, ResponsesRequest) else MessagesAnswer
    response = await completion.respond()
    if asked.left_out:
        response.headers[LEFT_OUT] = ", ".join(asked.left_out)[:1000].encode("ascii", "replace").decode()
    return response


@router.post("/responses", response_class=JSONResponse, responses=WHOLE)
async def create_response(
    request: Request, context: ContextDep, principal: PrincipalDep, body: ResponsesRequest
) -> Response:
    """The model's next turn, as OpenAI's Responses API has it."""
    return await answered(ServedCompletion(context, principal, request, body.chat()), body)


@router.post("/messages", response_class=JSONResponse, responses=WHOLE)
async def create_message(
    request: Request, context: ContextDep, principal: PrincipalDep, body: MessagesRequest
) -> Response:
    """The model's next turn, as Anthropic's Messages API has it."""
    return await answered(ServedCompletion(context, principal, request, body.chat()), body)
