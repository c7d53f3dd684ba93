"""Log lines as they go to the people whose job they concern: short enough to be kept, and without the server's paths.

The process's own log, on stderr, has everything in full.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping

# Of a line as one JSON object.
MAX_CHARACTERS = 4000
# Of a text that is cut, so much is its beginning: the end of a traceback is what happened.
HEAD_SHARE = 0.3
LEAST_KEPT = 60
_TRACED_FILE = re.compile(r'File "([^"\n]+)"')


def job_line(event: Mapping[str, object]) -> str:
    """The event as JSON of at most MAX_CHARACTERS, its longest texts cut in the middle."""
    shown = {
        name: without_paths(value) if isinstance(value, str) else value for name, value in json_safe(event).items()
    }
    while len(line := json.dumps(shown)) > MAX_CHARACTERS:
        longest = max(shown, key=lambda name: len(json.dumps(shown[name])))
        value = shown[longest]
        text = value if isinstance(value, str) else json.dumps(value)
        # Escapes make it longer in JSON than it is: several rounds.
        room = len(text) - max(1, (len(line) - MAX_CHARACTERS) * len(text) // len(json.dumps(text)))
        if len(text) <= LEAST_KEPT:
            # Nothing in it is long, there is much of it.
            return json.dumps({"event": head_and_tail(line, MAX_CHARACTERS // 4)})
        shown[longest] = head_and_tail(text, max(LEAST_KEPT, room))
    return line


def json_safe(event: Mapping[str, object]) -> dict[str, object]:
    """The event as JSON can hold it."""
    decoded: dict[str, object] = json.loads(json.dumps(dict(event), default=repr))
    return decoded


def head_and_tail(text: str, most: int) -> str:
    """The text, or its beginning and its end and how much is missing between them; at most so many characters."""
    if len(text) <= most:
        return text
    gap = f"\n[{len(text) - most} characters left out]\n"
    room = max(0, most - len(gap))
    head = int(room * HEAD_SHARE)
    return text[:head] + gap[: most - room] + text[len(text) - (room - head) :]


def without_paths(text: str) -> str:
    """A traceback with modules in place of files: `File "spo.model.folder"`."""
    return _TRACED_FILE.sub(lambda found: f'File "{_module(found[1])}"', text)


def _module(file: str) -> str:
    for root in sorted(filter(None, sys.path), key=len, reverse=True):
        if file.startswith(f"{root.rstrip('/')}/"):
            file = file[len(root.rstrip("/")) + 1 :]
            break
    else:
        # Of a file that no import found, and of what has no file, the name is enough.
        file = file.rpartition("/")[2]
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
