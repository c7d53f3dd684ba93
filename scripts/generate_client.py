"""Write the synchronous SDK from the asynchronous one with unasync: `make sdk`; a test holds it.

spo/client/_async/*.py  ->  spo/client/_sync/*.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

ROOT = Path(__file__).parents[1]
SOURCE, TARGET = (ROOT / "spo" / "client" / name for name in ("_async", "_sync"))
CLASSES = (
    "BaseTransport",
    "Client",
    "Connection",
    "ContinualCalls",
    "DatasetCalls",
    "DeadLetterCalls",
    "ExperienceCalls",
    "PlatformCalls",
    "ServingCalls",
    "TrainingCalls",
)
REPLACEMENTS = {
    "_async": "_sync",
    **{f"Async{name}": name for name in CLASSES},
    "asyncio": "time",
    "aclose": "close",
    "aread": "read",
    "aiter_bytes": "iter_bytes",
    "aiter_sse": "iter_sse",
    "aconnect_sse": "connect_sse",
}
_MADE = "# Made from {source} by `make sdk`: edit that.\n"


def synchronous() -> dict[str, str]:
    """Text of each synchronous module by its file name."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before", Path(folder) / "after"
        before.mkdir()
        sources = {path.name: path for path in sorted(SOURCE.glob("*.py")) if path.name != "__init__.py"}
        for name, source in sources.items():
            (before / name).write_text(source.read_text())
        rule = unasync.Rule(f"{before}/", f"{after}/", REPLACEMENTS)
        unasync.unasync_files([str(before / name) for name in sources], [rule])
        for name, source in sources.items():
            place = after / name
            place.write_text(_MADE.format(source=source.relative_to(ROOT)) + _spoken(place.read_text()))
        ruff = [sys.executable, "-m", "ruff"]
        settings = ["--config", str(ROOT / "pyproject.toml"), "--config", f'src = ["{ROOT}"]']
        subprocess.run([*ruff, "check", "--fix", "--quiet", *settings, str(after)], check=True, timeout=60)
        subprocess.run([*ruff, "format", "--quiet", *settings, str(after)], check=True, timeout=60)
        return {name: (after / name).read_text() for name in sources}


def _spoken(text: str) -> str:
    """The module's docstring, where unasync does not go, without asyncio."""
    docstring, quotes, rest = text[3:].partition('"""')
    docstring = docstring.replace(", for asyncio. `spo/client/_sync` is made from it: edit here, then `make sdk`.", ".")
    docstring = re.sub(r"\basync (with|for)", r"\1", docstring).replace("AsyncClient", "Client")
    docstring = re.sub(r"\(await ([^\n]*?\))\)\.", r"\1.", docstring).replace("await ", "")
    return '"""' + docstring + quotes + rest


if __name__ == "__main__":
    for name, text in synchronous().items():
        (TARGET / name).write_text(text)
