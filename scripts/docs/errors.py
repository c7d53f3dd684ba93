"""The page of the error codes: every `code` that the sources raise, with its kind and its text."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from spo.errors import catalogue

# Kind -> HTTP status, as services/orchestrator/http/errors.py maps them.
STATUSES = {
    "InvalidInput": "422",
    "NotFound": "404",
    "Conflict": "409",
    "PreconditionFailed": "412",
    "LeaseLost": "412",
    "NotReady": "503, try again",
    "Unreachable": "503, try again",
    "ResourceExhausted": "429, try again",
    "IntegrityError": "500",
    "InternalError": "500",
}


def page(root: Path) -> str:
    """Markdown table of the codes; one may come with several texts."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted([*(root / "spo").rglob("*.py"), *(root / "services").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                _add(node, found)
    lines = [
        "# Error codes",
        "",
        "Every code that the platform raises, and the texts it comes with (`...` stands for what is filled in).",
        "The HTTP status is that of the kind; a few codes have their own, such as `unauthorized` 401. What to do:",
        "[troubleshooting](../troubleshooting.md).",
        "",
    ]
    for code, kinds in sorted(found.items()):
        statuses = ", ".join(f"{kind} ({STATUSES[kind]})" for kind in sorted(kinds))
        texts = sorted({text for each in kinds.values() for text in each if text})
        entry = catalogue().get(code)
        said = [f"{entry.meaning} {entry.remedy}", ""] if entry else []
        lines += [f"## {code}", "", statuses, "", *said, *(f"- {text}" for text in texts), ""]
    return "\n".join(lines)


def _add(call: ast.Call, found: dict[str, dict[str, set[str]]]) -> None:
    function = call.func
    kind = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    code = next((each.value for each in call.keywords if each.arg == "code"), None)
    if kind not in STATUSES or not isinstance(code, ast.Constant) or not isinstance(code.value, str):
        return
    found[code.value][kind].add(_text(call.args[0]) if call.args else "")


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
        case _:
            return ""
