"""`spo` within the tests' own process: loading it takes two CPU seconds of every process that is started for it.

What a process of its own adds (its start, its environment, signals, what it leaves behind) is tested in
tests/unit/cli/test_command_line.py, tests/integration/cli and tests/e2e/live.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

import structlog

from spo.cli.app import main
from spo.console import console, error_console

# No cell of a table is cut; rich reads the variable only once, when a console is made.
COLUMNS = 200


def spo(
    *arguments: str | Path, environment: Mapping[str, str], folder: Path | None = None, stdin: str = ""
) -> CompletedProcess[str]:
    """What `spo ARGUMENTS` prints and ends with, with these variables beside those of the tests, in `folder`."""
    words = ["spo", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    patches = (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        mock.patch.dict(os.environ, {"NO_COLOR": "1", "COLUMNS": str(COLUMNS), **environment}),
        mock.patch.object(console, "_width", COLUMNS),
        mock.patch.object(error_console, "_width", COLUMNS),
        _logs_elsewhere(),
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            main()
            status: object = 0
        except SystemExit as ended:
            status = ended.code or 0
    assert isinstance(status, int), status
    return CompletedProcess(words, status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _logs_elsewhere() -> Iterator[None]:
    """What services in this process log meanwhile is not the command's: it goes to standard error as it is now, since
    to standard output structlog writes as it is then.
    """
    before = structlog.get_config()["logger_factory"]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        yield
    finally:
        structlog.configure(logger_factory=before)
