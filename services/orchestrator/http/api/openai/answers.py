"""Answers in OpenAI's form, whole or in chunks, from the parts that replicas send."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spo.v1.inference_service_pb2 import ServedPart, ServedToken, ServeResponse

Json = dict[str, object]


@dataclass
class Choice:
    """One sample as far as it has come."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[ServedToken] = field(default_factory=list)
    finish_reason: str = ""
    version_first: int = 0
    version_last: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class OpenAiAnswer:
    """A completion as it grows: what clients are told of it, and what may be captured."""

    id: str
    model: str
    job_id: str
    kind: Literal["chat", "plain"]
    created: int
    choices: list[Choice]
    prompt_token_ids: Sequence[int] = ()
    model_hash: str = ""
    sampler: str = ""

    def add(self, response: ServeResponse) -> None:
        """Take in what a replica has sent."""
        if response.prompt_token_ids:
            self.prompt_token_ids = tuple(response.prompt_token_ids)
            self.model_hash, self.sampler = response.model_hash, response.sampler
        for part in response.parts:
            choice = self.choices[part.index]
            choice.texts.append(part.text)
            choice.token_ids.extend(part.token_ids)
            choice.tokens.extend(part.tokens)
            if part.finish_reason:
                choice.finish_reason = part.finish_reason
                choice.version_first, choice.version_last = part.version_first, part.version_last

    @property
    def is_whole(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Of the prompt and all samples."""
        return len(self.prompt_token_ids) + sum(len(choice.token_ids) for choice in self.choices)

    def document(self) -> Json:
        """The whole completion."""
        choices = [self._choice(choice) for choice in self.choices]
        versions = sorted({choice.version_last for choice in self.choices})
        fingerprint = f"{self.job_id}@{'-'.join(map(str, versions))}"
        return {**self._head(""), "system_fingerprint": fingerprint, "choices": choices, "usage": self.usage()}

    def chunk(self, part: ServedPart) -> bytes:
        """What one sample has got since its last chunk, as an event."""
        finish = part.finish_reason or None
        if self.kind == "chat":
            logprobs = _chat_logprobs(part.tokens) if part.tokens else None
            choice: Json = {"index": part.index, "delta": {"content": part.text}, "logprobs": logprobs}
        else:
            offset = sum(map(len, self.choices[part.index].texts)) - len(part.text)
            logprobs = _plain_logprobs(part.tokens, offset) if part.tokens else None
            choice = {"index": part.index, "text": part.text, "logprobs": logprobs}
        return event({**self._head(".chunk"), "choices": [{**choice, "finish_reason": finish}]})

    def opening(self) -> bytes:
        """The first chunks of a chat: whose turn it is."""
        if self.kind == "plain":
            return b""
        begun = ({"index": each.index, "delta": {"role": "assistant", "content": ""}} for each in self.choices)
        return b"".join(event({**self._head(".chunk"), "choices": [{**each, "finish_reason": None}]}) for each in begun)

    def closing(self, *, include_usage: bool) -> bytes:
        """The last chunks."""
        usage = event({**self._head(".chunk"), "choices": [], "usage": self.usage()}) if include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def usage(self) -> Json:
        """Tokens of the prompt and of all samples."""
        prompt = len(self.prompt_token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens - prompt, "total_tokens": self.tokens}

    def _head(self, chunk: str) -> Json:
        name = f"chat.completion{chunk}" if self.kind == "chat" else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _choice(self, choice: Choice) -> Json:
        if self.kind == "chat":
            said: Json = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            said["logprobs"] = _chat_logprobs(choice.tokens) if choice.tokens else None
        else:
            said = {"text": choice.text, "logprobs": _plain_logprobs(choice.tokens) if choice.tokens else None}
        return {"index": choice.index, **said, "finish_reason": choice.finish_reason}


def event(document: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _chat_logprobs(tokens: Iterable[ServedToken]) -> Json:
    content = [{**_token(token), "top_logprobs": [_token(each) for each in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _token(token: ServedToken) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}


def _plain_logprobs(tokens: Iterable[ServedToken], offset: int = 0) -> Json:
    known = list(tokens)
    offsets = []
    for token in known:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in known],
        "token_logprobs": [token.logprob for token in known],
        "top_logprobs": [{each.text: each.logprob for each in token.top} for token in known],
        "text_offset": offsets,
    }
