"""Which error of a handler becomes what, and how a failure that lasts is told."""

from __future__ import annotations

from typing import Literal

import grpc
import pytest
import structlog
from pydantic import BaseModel, ValidationError
from structlog.testing import LogCapture

from spo import errors
from spo.messaging.streams import recovery
from spo.messaging.streams.recovery import Fate, Outage, fate_of, last_line
from spo.rpc.client import error_of


class Refused(grpc.RpcError):
    """What a client sees of a call that a server ended without details of ours."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self.status = status

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return "because"

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (errors.InvalidInput("not a group"), Fate.DEAD_LETTER),
        (errors.InvalidInput("too long", code="prompt_too_long"), Fate.DEAD_LETTER),
        (errors.NotFound("there is no run", code="unknown_run"), Fate.DROP),
        (errors.NotFound("no such test set", code="unknown_tests"), Fate.RETRY),
        (errors.NotReady("the judge failed 3 times on this program", code="judge_fault"), Fate.RETRY),
        (errors.Unreachable("value-estimation did not answer"), Fate.RETRY),
        (errors.ResourceExhausted("4096 programs are waiting"), Fate.RETRY),
        (errors.PreconditionFailed("this replica serves another run", code="other_run"), Fate.RETRY),
        (errors.Conflict("somebody else is at it"), Fate.RETRY),
        (errors.IntegrityError("digest mismatch"), Fate.RETRY),
        (errors.InternalError("CUDA out of memory"), Fate.RETRY),
        (MemoryError(), Fate.RETRY),
        (KeyError("a bug of ours"), Fate.RETRY),
    ],
    ids=lambda part: f"{type(part).__name__}:{getattr(part, 'code', '')}" if isinstance(part, Exception) else part,
)
def test_only_invalid_input_is_a_dead_letter_and_only_a_deleted_run_is_dropped(error: Exception, fate: Fate) -> None:
    assert fate_of(error) is fate


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
def test_of_all_answers_of_a_service_only_invalid_argument_is_a_verdict_on_the_entry(status: grpc.StatusCode) -> None:
    expected = Fate.DEAD_LETTER if status is grpc.StatusCode.INVALID_ARGUMENT else Fate.RETRY
    assert fate_of(error_of(Refused(status), "value-estimation", "here:1")) is expected


def test_an_outage_is_one_line_then_one_each_half_minute_with_a_count_then_one(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = LogCapture()
    structlog.configure(processors=[captured])
    clock = [100.0]
    monkeypatch.setattr(recovery.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(recovery, "log", structlog.get_logger())
    outage = Outage("a stream cannot be read", stream="s")

    for _ in range(100):
        outage.failed(errors.NotReady("MISCONF disk full"))
        clock[0] += 1.0
    outage.over()
    outage.over()

    assert [(line["event"], line.get("failures")) for line in captured.entries] == [
        ("a stream cannot be read", None),
        ("a stream cannot be read, still", 31),
        ("a stream cannot be read, still", 61),
        ("a stream cannot be read, still", 91),
        ("a stream cannot be read: over", 100),
    ]


def test_what_killed_work_is_said_by_the_line_that_says_the_most() -> None:
    class Config(BaseModel):
        architecture: Literal["known"]

    with pytest.raises(ValidationError) as refused:
        Config(architecture="unknown")
    assert "should be 'known'" in last_line(refused.value)
    assert last_line(RuntimeError("first\n\nlast\n")) == "RuntimeError: last"
    assert last_line(RuntimeError()) == "RuntimeError: without a message"
