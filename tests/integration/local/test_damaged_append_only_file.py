"""An append-only file with a hole: Redis refuses it, the command cuts it, what was before the hole is there again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spo.cli.app import app
from spo.errors import Conflict, NotFound
from spo.local.launcher import check_append_only_file, server_command
from spo.messaging.redis_client import connect

KEYS = 2000


def fill(folder: Path, port: int) -> None:
    server = subprocess.Popen(server_command(port, folder), stdout=subprocess.DEVNULL)
    try:
        with connect(f"redis://127.0.0.1:{port}/0", 20) as client:
            for number in range(KEYS):
                client.set(f"k{number}", "v" * 50)
            with pytest.raises(Conflict, match=f"Redis with pid {server.pid}"):
                check_append_only_file(folder, repair=True)
    finally:
        server.terminate()
        server.wait(20)


def loaded(folder: Path, port: int) -> int | None:
    """How many keys a server finds; None where it ends."""
    server = subprocess.Popen(server_command(port, folder), stdout=subprocess.DEVNULL)
    try:
        with connect(f"redis://127.0.0.1:{port}/0", 20) as client:
            while server.poll() is None:
                if found := client.dbsize():  # type: ignore[attr-defined]
                    return int(found)
                time.sleep(0.05)
    except Exception:
        if server.poll() is None:
            raise
    finally:
        server.kill()
        server.wait(20)
    return None


def spoil(file: Path, share: float, damage: Callable[[int], bytes]) -> None:
    at = int(file.stat().st_size * share)
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(damage(64))


@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize("damage", [bytes, lambda size: b"\xff" * size], ids=["zeros", "ones"])
def test_a_file_with_a_hole_is_cut_there_after_a_backup(
    share: float, damage: Callable[[int], bytes], free_port: int, tmp_path: Path
) -> None:
    fill(tmp_path, free_port)
    (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    spoil(file, share, damage)
    spoiled = file.read_bytes()
    run = CliRunner().invoke

    looked = run(app, ["platform", "repair-redis", "--folder", str(tmp_path)])
    assert looked.exit_code == 1
    assert file.read_bytes() == spoiled, "a look changes nothing"
    cut = run(app, ["platform", "repair-redis", "--folder", str(tmp_path), "--cut"])

    assert cut.exit_code == 0, cut.output
    (backup,) = tmp_path.glob("appendonlydir.before-repair-*")
    assert (backup / file.name).read_bytes() == spoiled
    found = loaded(tmp_path, free_port)
    assert found is not None
    assert abs(found - share * KEYS) < 0.05 * KEYS
    assert run(app, ["platform", "repair-redis", "--folder", str(tmp_path)]).exit_code == 0


def test_a_folder_without_such_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no append-only file"):
        check_append_only_file(tmp_path, repair=False)
