"""The page of the command line, from typer's own description of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer


def page(_root: Path) -> str:
    """Markdown of every command with its arguments and options."""
    from spo.cli.app import app
    from spo.console import EXIT_CODES

    command = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "`spo --install-completion` sets up completion for your shell. `SPO_API_URL` and `SPO_API_KEY` say which",
        "platform; without them it is the one started last on this machine.",
        "",
        "Exit codes are stable:",
        "",
        "| Code | Meaning |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES),
        "",
    ]
    for name, each in _commands("spo", command):
        lines += _section(name, each)
    return "\n".join(lines)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child in sorted(children):
        yield from _commands(f"{name} {child}", children[child])


def _section(name: str, command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join([name, *(each.name.upper() for each in arguments), "[OPTIONS]" if options else ""])
    lines = [f"## {name}", "", (command.help or "").strip(), "", "```", usage.strip(), "```", ""]
    if arguments or options:
        lines += ["| | Meaning | Default |", "|---|---|---|"]
        for each in [*arguments, *options]:
            label = " ".join([*each.opts, *each.secondary_opts]) if each in options else each.name.upper()
            default = "required" if each.required else _default(each.default)
            lines.append(f"| `{label}` | {_cell(getattr(each, 'help', '') or '')} | {default} |")
        lines.append("")
    return lines


def _default(value: Any) -> str:
    if value is None or value is False or value == () or callable(value) or "Sentinel" in type(value).__name__:
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
