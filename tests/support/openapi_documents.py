"""Documents made up from docs/openapi.json: what the API may answer to an operation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

OPENAPI: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text())
# Asked with clients of OpenAI's and Anthropic's APIs, which have models of their own; agents ask below their session.
FOREIGN = re.compile(r"/s/.*|/v1/(chat/completions|completions|messages|models|models/\{model\}|responses)")
SCHEMAS: dict[str, Any] = OPENAPI["components"]["schemas"]


def example(schema: dict[str, Any]) -> Any:
    """A document of the schema with every property; lists have one entry, alternatives their first form.

    Objects whose members the API does not fix are empty, or left out where they may be.
    """
    if "$ref" in schema:
        return example(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return None if _is_open(schema["anyOf"][0]) else example(schema["anyOf"][0])
    if "enum" in schema:
        return schema["enum"][-1]
    match schema.get("type"):
        case "object":
            return {name: example(part) for name, part in schema.get("properties", {}).items()} or _mapping(schema)
        case "array":
            return [] if _is_open(schema["items"]) else [example(schema["items"])]
        case "integer" | "number":
            return 1
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return ""


def _is_open(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "object" and schema.get("additionalProperties") is True


def _mapping(schema: dict[str, Any]) -> dict[str, Any]:
    values = schema.get("additionalProperties")
    return {"version": example(values)} if isinstance(values, dict) else {}


def answer_to(method: str, path: str) -> Any:
    """A document that the API may answer to a request; None for an answer without JSON."""
    for pattern, operations in OPENAPI["paths"].items():
        if method.lower() in operations and re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", pattern), path):
            responses = operations[method.lower()]["responses"]
            success = next(response for status, response in responses.items() if status.startswith("2"))
            content = success.get("content", {}).get("application/json")
            return None if content is None else example(content["schema"])
    raise AssertionError(f"the API has no {method} {path}")
