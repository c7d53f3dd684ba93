"""Inside an image, or where its packages alone are seen: every command and every module of its roles starts.

python image_starts.py ROLE... prints {"commands": how many, "faults": {what: why}}. It is given to `python -c` whole.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner

from spo.cli.app import app


def paths(command: Any, path: list[str]) -> Iterator[list[str]]:
    """The words of a command and of all below it."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from paths(below, [*path, name])


def main(roles: list[str]) -> None:
    """Ask each command for its help and load each module."""
    faults, commands = {}, 0
    for path in paths(typer.main.get_command(app), []):
        ended = CliRunner().invoke(app, [*path, "--help"])
        commands += 1
        if ended.exit_code:
            faults["spo " + " ".join(path)] = repr(ended.exception)
    for name in [*(f"services.{role}" for role in roles), "spo.cli", "spo.rpc.healthcheck", "spo.doctor"]:
        found = importlib.import_module(name)
        for below in pkgutil.walk_packages(getattr(found, "__path__", []), name + "."):
            try:
                importlib.import_module(below.name)
            except ImportError as error:
                # A library of environments that people bring themselves.
                if error.name != "verifiers":
                    faults[below.name] = repr(error)
    print(json.dumps({"commands": commands, "faults": faults}))


if __name__ == "__main__":
    main(sys.argv[1:])
