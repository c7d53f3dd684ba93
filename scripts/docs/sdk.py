"""The page of the SDK's methods, from the synchronous client's signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HEAD = """# SDK methods

The methods of `Client`; `AsyncClient` has the same with `await`. Models are in `spo.client.models`, named as in the
[REST API's schemas](rest.md#schemas); [how to use it](../sdk.md)."""


def page(root: Path) -> str:
    """Markdown of every public method by section, in the order of the source; deterministic."""
    from spo.client import Client
    from spo.client._sync.calls import DatasetCalls, DeadLetterCalls, ExperienceCalls, PlatformCalls, TrainingCalls

    sections: dict[str, type] = {
        "client": Client,
        "client (what a job makes)": TrainingCalls,
        "client.datasets": DatasetCalls,
        "client.dead_letters": DeadLetterCalls,
        "client.experience": ExperienceCalls,
        "client.platform": PlatformCalls,
    }
    lines = [HEAD, ""]
    for title, kind in sections.items():
        lines += [f"## {title}", ""]
        for name, method in methods(kind):
            signature = str(inspect.signature(method)).replace("(self, ", "(").replace("(self)", "()")
            shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
            lines += [f"### {name}", "", "```python", f"{name}{shown}", "```", "", inspect.getdoc(method) or "", ""]
    return "\n".join(lines)


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods that a class defines itself."""
    for name, member in vars(kind).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name, member
