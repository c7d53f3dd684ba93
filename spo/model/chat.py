"""How a job writes its prompts and where its responses end: plain facts, which need no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

TemplateArgument = bool | int | float | str | None


@dataclass(frozen=True)
class ChatFormat:
    """What `spo.model.tokenizer` writes prompts and reads responses by; the fields of JobSpec's model.chat and stop."""

    template: Literal["auto", "none"] = "auto"
    system: str | None = None
    template_arguments: Mapping[str, TemplateArgument] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = ("<think>", "</think>")

    @property
    def address(self) -> str:
        """What differs from the defaults, as canonical text; "" for the defaults.

        A part of every key under which something outlives a job that depends on its prompts or its responses' ends.
        """
        usual = asdict(USUAL)
        chosen = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return json.dumps(chosen, sort_keys=True) if chosen else ""

    def cut(self, text: str) -> str:
        """The text before the first stop string that is complete in it."""
        ends = [(start + len(stop), start) for stop in self.stop if (start := text.find(stop)) >= 0]
        return text[: min(ends)[1]] if ends else text

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends with the beginning of reasoning, as some templates write it."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0].rstrip())

    def reasoning_length(self, response: str, *, opened: bool = False) -> int:
        """How many characters of a response, from its beginning, are reasoning; opened: the prompt has begun it.

        Reasoning that is not ended is all there is: its drafts are no answer.
        """
        if self.reasoning is None:
            return 0
        begins, ends = self.reasoning
        before, ended, answer = response.rpartition(ends)
        is_open = begins in answer or (opened and not ended)
        return len(response) if is_open else len(before) + len(ended)


USUAL = ChatFormat()
