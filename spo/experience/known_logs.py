"""Logs of programs that many use, as mappings of our columns to paths into their rows (see `mapped`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

KnownLog = Literal["openai", "langfuse", "phoenix"]
KNOWN_LOGS: Mapping[KnownLog, Mapping[str, str]] = {
    # A request and its response as the API has them, each under its name or both together.
    "openai": {
        "statement": "request.messages.-1.content|messages.-1.content|prompt",
        "response_text": "response.choices.0.message.content|choices.0.message.content|choices.0.text",
        "trajectory_id": "response.id|id",
        "sampler": "response.model|model",
    },
    # Observations of type GENERATION as Langfuse exports them to JSONL: input and output as they were traced,
    # perhaps as text that is JSON. https://langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields
    "langfuse": {
        "statement": "input.messages.-1.content|input.-1.content|input.prompt|input",
        "response_text": "output.choices.0.message.content|output.content|output.-1.content|output",
        "trajectory_id": "id",
        "sampler": "provided_model_name|model",
    },
    # LLM spans of Phoenix, `get_spans_dataframe().to_json(orient="records", lines=True)`: OpenInference's attributes.
    # https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md
    "phoenix": {
        "statement": "attributes.llm.input_messages.-1.message.content|attributes.input.value",
        "response_text": "attributes.llm.output_messages.0.message.content|attributes.output.value",
        "trajectory_id": "context.span_id",
        "sampler": "attributes.llm.model_name",
    },
}
