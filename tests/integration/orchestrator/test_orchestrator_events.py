"""A job's history, live: no gap and no repeat, however often the connection breaks."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from services.orchestrator.desk import Desk
from services.orchestrator.states import CANCEL
from spo.job_spec import parse_job_spec

STREAM = {"Accept": "text/event-stream"}


def submitted(desk: Desk, document: dict[str, Any]) -> str:
    return desk.jobs.submit(parse_job_spec(document))


def follow(api: httpx.Client, job_id: str, last_seen: int, at_most: int) -> list[int]:
    """Reads at most so many events after one, checks that id and body agree, and hangs up."""
    seen: list[int] = []
    headers = {**STREAM, "Last-Event-ID": str(last_seen)}
    with api.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event_id = ""
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            if name == "data":
                assert json.loads(value)["seq"] == int(event_id)
                seen.append(int(event_id))
                if len(seen) == at_most:
                    break
    return seen


def test_history_comes_in_pages(desk: Desk, api: httpx.Client, document: dict[str, Any]) -> None:
    job_id = submitted(desk, document)
    for number in range(5):
        desk.jobs.append(job_id, "progress", {"done": number})

    first = api.get(f"/v1/jobs/{job_id}/events", params={"limit": 4}).json()
    rest = api.get(f"/v1/jobs/{job_id}/events", params={"limit": 4, "after_seq": first["next_cursor"]}).json()

    assert [event["seq"] for event in first["items"] + rest["items"]] == [1, 2, 3, 4, 5, 6]
    assert rest["next_cursor"] is None


def test_a_stream_cut_again_and_again_misses_and_repeats_nothing(
    desk: Desk, api: httpx.Client, document: dict[str, Any]
) -> None:
    job_id = submitted(desk, document)
    total = 201

    def write() -> None:
        for number in range(total - 2):
            desk.jobs.append(job_id, "progress", {"done": number})
        desk.jobs.act(job_id, CANCEL)

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[int] = []
    while len(seen) < total:
        seen += follow(api, job_id, seen[-1] if seen else 0, at_most=5)
    writer.join()

    assert seen == list(range(1, total + 1))


def test_a_stream_ends_with_the_job(desk: Desk, api: httpx.Client, document: dict[str, Any]) -> None:
    job_id = submitted(desk, document)
    threading.Timer(2.0, desk.jobs.act, (job_id, CANCEL)).start()

    assert follow(api, job_id, 0, at_most=1000) == [1, 2]


def test_a_drained_orchestrator_ends_its_streams(desk: Desk, api: httpx.Client, document: dict[str, Any]) -> None:
    job_id = submitted(desk, document)
    threading.Timer(2.0, desk.stop.set).start()

    assert follow(api, job_id, 0, at_most=1000) == [1]
