"""Processes that compare answers by expressions and schemas, each ended where an answer takes it too long."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.sandbox_judge.answers.frames import Finding, read_frame, write_frame
from spo.errors import NotReady
from spo.observability.logs import get_logger
from spo.v1.verdict_pb2 import AnswerRule

log = get_logger("comparison_pool")

Result = TypeVar("Result")

PROCESSES = 2
# The child ends a comparison by its own clock of processor time; this one is for a machine or a child that hangs.
WALL_SECONDS = 30.0
_CHILD = "services.sandbox_judge.answers.comparison_child"


class ComparisonPool:
    """Compares in up to PROCESSES children, started when first needed. Safe from several threads."""

    def __init__(self) -> None:
        self._idle: list[ComparisonProcess] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(PROCESSES, "comparison")

    def compare(
        self, rule: AnswerRule, futures: Mapping[str, Future[Result]], result: Callable[[str, Finding, str], Result]
    ) -> None:
        """Set each response's future to what `result` makes of (response, finding, reason), or to NotReady where no
        child can be started; a future that was cancelled is passed over."""
        self._threads.submit(self._compare_all, rule.SerializeToString(), futures, result)

    def close(self) -> None:
        """End the children; what waits is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _compare_all(
        self, rule: bytes, futures: Mapping[str, Future[Result]], result: Callable[[str, Finding, str], Result]
    ) -> None:
        for response, future in futures.items():
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(result(response, *self._compare(rule, response)))
            except Exception as error:
                future.set_exception(error)

    def _compare(self, rule: bytes, response: str) -> tuple[Finding, str]:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        found = child.compare(rule, response) if child else None
        if child is None or found is None:
            # What killed one that had lived for a while need not be this answer.
            if child is not None:
                child.close()
            child = ComparisonProcess()
            found = child.compare(rule, response)
        if found is None:
            log.warning("a comparison ended its process", status=child.close())
            return Finding.TIME, "the comparison did not come to an end"
        with self._lock:
            self._idle.append(child)
        return found


class ComparisonProcess:
    """One process that compares. Raises NotReady when it does not start."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ},
        )
        if self._answer() is None:
            status = self.close()
            raise NotReady(f"the process that compares answers did not start: status {status}", code="judge_fault")

    def compare(self, rule: bytes, response: str) -> tuple[Finding, str] | None:
        """What a response comes to; None when the process did not live to say."""
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, rule)  # type: ignore[arg-type]
            write_frame(self._process.stdin, response.encode("utf-8", "surrogatepass"))  # type: ignore[arg-type]
        except OSError:
            return None
        answer = self._answer()
        return None if not answer else (Finding(answer[:1]), answer[1:].decode("utf-8", "replace"))

    def close(self) -> int | None:
        """End it; returns its status."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        return self._process.wait()

    def _answer(self) -> bytes | None:
        assert self._process.stdout is not None
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        return read_frame(self._process.stdout) if waiting.poll(WALL_SECONDS * 1000) else None  # type: ignore[arg-type]
