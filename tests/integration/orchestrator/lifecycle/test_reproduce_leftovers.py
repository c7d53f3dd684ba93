"""A sitting of `make reproduce` after one that was interrupted, against the real API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from spo.client import Client
from spo.local.launcher import LocalPlatform
from spo.reproduce.command import RunExecutor


def test_an_interrupted_sitting_is_taken_up_and_what_else_it_left_is_cancelled(
    api: httpx.Client, document: dict[str, Any], tmp_path: Path
) -> None:
    run = document | {"name": "p32/ppo/seed0"}
    with Client(str(api.base_url)) as client:
        # Only submitting is looked at, for which no process of a platform is needed.
        executor = RunExecutor(LocalPlatform("unused", tmp_path), client, tmp_path, lambda *_: None)
        begun = executor._submit(run, "key")
        left = client.submit(document | {"name": "hard/ppo/seed0"})
        somebodys = client.submit(document | {"name": "mine"})

        assert executor._submit(run, "key").id == begun.id
        assert [client.get(job.id).state for job in (begun, left, somebodys)] == ["queued", "cancelled", "queued"]
        client.cancel(begun.id)
        anew = executor._submit(run, "key")
        assert (anew.state, anew.name) == ("queued", "p32/ppo/seed0")
        assert anew.id != begun.id
        assert executor._submit(run, "key").id == anew.id
