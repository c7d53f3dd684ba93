"""Where an action calls a tool: the last call counts, and one that is not closed yet, since a stop string ended it."""

from __future__ import annotations

_FENCE = "```"


def tagged_call(action: str, tag: str) -> str | None:
    """What the last <tag> of an action holds, up to </tag> or the action's end; None: there is none."""
    _, opened, inside = action.rpartition(f"<{tag}>")
    return inside.partition(f"</{tag}>")[0] if opened else None


def fenced_call(action: str, languages: tuple[str, ...]) -> str | None:
    """The last fenced block that names one of these languages; None: there is none."""
    found = None
    for inside in action.split(_FENCE)[1::2]:
        label, newline, body = inside.partition("\n")
        if newline and label.strip().lower() in languages:
            found = body
    return found
