"""`spo up` and `spo down`: the launcher with a table of who is ready, until a signal ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from rich.live import Live
from rich.table import Table

from spo.console import console
from spo.errors import NotFound, NotReady
from spo.local.launcher import LauncherSettings, LocalPlatform
from spo.local.state import running_platforms
from spo.observability.logs import configure_logs
from spo.service.settings import PlatformSettings

STOP_SECONDS = 60.0


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM reached the launcher."""


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Turn SIGTERM into the same exception as Ctrl-C, once: a second signal does not break the clean-up."""

    def interrupt(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_platform(name: str, port: int | None = None) -> None:
    """Run the platform in the foreground. Raises NotReady, Conflict."""
    configure_logs("launcher", log_format="console")
    try:
        settings = LauncherSettings() if port is None else LauncherSettings(http_port=port)
        with signals_interrupt(), LocalPlatform(name, PlatformSettings().state_path, settings) as platform:
            wait_with_table(platform)
            console.print(f"API and web page at [bold]{platform.http_url}[/]; logs in {platform.folder}/logs")
            console.print("Ctrl-C or `spo down` stops everything.")
            platform.wait_until_stopped()
    except Interrupted:
        console.print("stopped")


def wait_with_table(platform: LocalPlatform) -> None:
    """Wait until every child is ready, showing which is."""
    with Live(console=console, refresh_per_second=4) as live:
        platform.wait_until_ready(lambda ready: live.update(_table(platform, ready)))


def stop_platforms(name: str | None) -> None:
    """Stop the platforms of this machine, or one of them, and wait until they are gone. Raises NotFound, NotReady."""
    running = running_platforms(LauncherSettings().runs_path)
    chosen = [state for state in running if name is None or state["name"] == name]
    if not chosen:
        raise NotFound(f"no platform {f'{name!r} ' if name else ''}runs here", code="platform_not_found")
    for state in chosen:
        launcher = psutil.Process(state["pid"])
        launcher.terminate()
        try:
            launcher.wait(STOP_SECONDS)
        except psutil.TimeoutExpired:
            message = (
                f"the launcher (pid {state['pid']}) did not end within {STOP_SECONDS:g} s; kill -9 ends it and all"
            )
            raise NotReady(message, code="stop_timeout") from None
        console.print(f"stopped {state['name']}")


def _table(platform: LocalPlatform, ready: dict[str, bool]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("service", "address", "pid", "ready"):
        table.add_column(column)
    for service in platform.services():
        mark = "[green]yes[/]" if ready[service["name"]] else "[yellow]starting[/]"
        if service["restarts"]:
            mark += f" [red]{service['restarts']} restarts[/]"
        table.add_row(service["name"], service["address"], str(service["pid"] or ""), mark)
    return table
