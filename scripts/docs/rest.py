"""The page of the REST API, from docs/openapi.json."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

METHODS = ("get", "post", "put", "patch", "delete")


def page(root: Path) -> str:
    """Markdown of every operation by tag, then of every schema; deterministic."""
    document = json.loads((root / "docs" / "openapi.json").read_text())
    lines = [
        "# REST API",
        "",
        "Bearer API keys; errors are RFC 9457 problems with a `code` ([troubleshooting](../troubleshooting.md)); lists",
        "are paged by `cursor`; `GET /openapi.json` of a running platform is the same description for programs.",
        "",
    ]
    by_tag: dict[str, list[tuple[str, str, Any]]] = defaultdict(list)
    for path, methods in sorted(document["paths"].items()):
        for method in METHODS:
            if method in methods:
                by_tag[(methods[method].get("tags") or ["platform"])[0]].append((method, path, methods[method]))
    for tag in sorted(by_tag):
        lines += [f"## {tag}", ""]
        for method, path, operation in by_tag[tag]:
            lines += _operation(method, path, operation)
    lines += ["## Schemas", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += _schema(name, schema)
    return "\n".join(lines)


def _operation(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"### {method.upper()} {path}", "", operation.get("description") or operation.get("summary", ""), ""]
    parameters = operation.get("parameters", [])
    if parameters:
        lines += ["| Parameter | In | Type | Meaning |", "|---|---|---|---|"]
        for each in parameters:
            mark = " (required)" if each.get("required") else ""
            meaning = _cell(each.get("description", ""))
            lines.append(f"| `{each['name']}`{mark} | {each['in']} | {_type(each.get('schema', {}))} | {meaning} |")
        lines.append("")
    body = operation.get("requestBody", {}).get("content", {})
    lines += [f"Body: {kind}, {_type(each.get('schema', {}))}\n" for kind, each in sorted(body.items())]
    for status, response in sorted(operation["responses"].items()):
        kinds = [f"{_type(each.get('schema', {}))}" for _, each in sorted(response.get("content", {}).items())]
        shown = ", ".join(dict.fromkeys(kinds))
        lines.append(f"- `{status}` {response.get('description', '')}" + (f": {shown}" if shown else ""))
    return [*lines, ""]


def _schema(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"### {name}", "", schema.get("description", ""), ""]
    if "enum" in schema:
        lines += ["One of " + ", ".join(f"`{each}`" for each in schema["enum"]) + ".", ""]
    moves = schema.get("x-legal-transitions")
    if moves:
        lines += ["| State | May become |", "|---|---|"]
        lines += [f"| {state} | {', '.join(after) or 'nothing: it is final'} |" for state, after in moves.items()]
        lines.append("")
    properties = schema.get("properties", {})
    if properties:
        required = set(schema.get("required", ()))
        lines += ["| Field | Type | Meaning |", "|---|---|---|"]
        for field, each in properties.items():
            mark = " (required)" if field in required else ""
            lines.append(f"| `{field}`{mark} | {_type(each)} | {_cell(_meaning(each))} |")
        lines.append("")
    return lines


def _meaning(schema: dict[str, Any]) -> str:
    words = [schema.get("description", "")]
    if "default" in schema:
        words.append(f"Default: `{json.dumps(schema['default'])}`.")
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    words += [f"{sign} {schema[name]}" for name, sign in limits.items() if name in schema]
    return " ".join(each for each in words if each)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[union]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    return str(schema.get("format") or schema.get("type") or "any")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
