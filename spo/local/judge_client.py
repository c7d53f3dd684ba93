"""A judge for the command line: the one that runs here, else one of its own that ends with the command."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from spo.errors import NotFound, NotReady, ResourceExhausted, SpoError, Unreachable
from spo.local.state import running_platforms
from spo.rpc.client import RpcClient, is_healthy
from spo.rpc.token import show_token
from spo.service.settings import PlatformSettings
from spo.v1.judge_service_pb2 import (
    DescribeJudgeRequest,
    DescribeJudgeResponse,
    JudgeRequest,
    Priority,
    UploadTestsRequest,
)
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.verdict_pb2 import TestSet, Verdict

EMBEDDED = "embedded"
AUTO = "auto"
START_SECONDS = 60.0
STOP_SECONDS = 5.0
ATTEMPTS = 3
PAUSE_SECONDS = 0.2
RUNNING_JUDGE_WORKERS = 4


@dataclass
class EmbeddedJudge:
    """The process of a judge that serves this command only."""

    address: str = ""
    workers: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    def start(self) -> None:
        """Start it and learn where it listens. Raises NotReady with its reason."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.sandbox_judge.embedded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            # Ctrl-C in the terminal then reaches the command alone, which ends the judge.
            start_new_session=True,
        )
        answer = self._first_line()
        if "address" not in answer:
            reason = answer.get("message") or self._last_words()
            self.stop()
            raise NotReady(f"the embedded judge did not start: {reason}", code=answer.get("code", "not_ready"))
        self.address, self.workers = answer["address"], int(answer["workers"])

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process; 0 before it is started."""
        return self._process.pid if self._process is not None else 0

    def stop(self) -> None:
        """End it and what it runs: it ends by itself when its standard input does."""
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout, self._log):
                if stream is not None:
                    stream.close()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_SECONDS)
            self._process = None

    def _first_line(self) -> dict[str, str]:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_SECONDS)[0]:
            return {"message": f"it said nothing for {START_SECONDS:g} s"}
        try:
            answer: dict[str, str] = json.loads(self._process.stdout.readline())
        except ValueError:
            return {}
        return answer

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2000))
        return self._log.read().decode(errors="replace").strip()


@dataclass
class JudgeClient:
    """Judges programs by one test set; safe to use from many threads. Use as a context manager.

    where: "auto" (the judge of the platform that runs here, else an embedded one), "embedded", or host:port.
    """

    test_set: TestSet
    where: str = AUTO
    runs_path: Path = Path("runs")
    workers: int = field(default=RUNNING_JUDGE_WORKERS, init=False)
    _embedded: EmbeddedJudge | None = field(default=None, init=False)
    _client: RpcClient | None = field(default=None, init=False)
    _digest: str = field(default="", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __enter__(self) -> JudgeClient:
        address = self._running_judge()
        if address is None:
            self._embedded = EmbeddedJudge()
            address = self._start_embedded(self._embedded)
        try:
            self._connect(address)
        except SpoError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, calls under way, and an embedded judge with all that it runs."""
        with self._lock:
            client, self._client = self._client, None
            if client:
                client.close()
            if self._embedded:
                self._embedded.stop()

    def judge_by(self, test_set: TestSet) -> None:
        """Judge by another test set from now on; not while calls are under way. Raises SpoError where it is refused."""
        self.test_set = test_set
        self._upload(self._connected())

    def describe(self) -> DescribeJudgeResponse:
        """What the judge is. Raises SpoError."""
        described: DescribeJudgeResponse = self._connected().call("DescribeJudge", DescribeJudgeRequest())
        return described

    def judge(self, source: bytes, language: str, *, stop_early: bool, deadline_seconds: float) -> Verdict:
        """The verdict on one program with details; a judge that fails or is busy is asked again.

        Raises SpoError when it keeps failing or deadline_seconds have passed.
        """
        deadline = time.monotonic() + deadline_seconds
        failures = 0
        while True:
            client, digest = self._connected(), self._digest
            try:
                request = _request(source, language, digest, stop_early=stop_early)
                verdict: Verdict = client.call("Judge", request, deadline - time.monotonic()).verdicts[0]
                return verdict
            except (NotFound, NotReady) as error:  # a judge that has lost its tests, or is gone
                failures += 1
                if failures == ATTEMPTS or time.monotonic() >= deadline or error.code == "judge_fault":
                    raise
            except ResourceExhausted:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(PAUSE_SECONDS)
            self._repair(client)

    def _connected(self) -> RpcClient:
        if self._client is None:
            raise Unreachable("the connection to the judge is not open")
        return self._client

    def _running_judge(self) -> str | None:
        if self.where == EMBEDDED:
            return None
        if self.where != AUTO:
            return self.where
        for state in running_platforms(self.runs_path):
            for service in state["services"]:
                if service["name"] == "sandbox-judge" and is_healthy(service["address"]):
                    return str(service["address"])
        return None

    def _start_embedded(self, embedded: EmbeddedJudge) -> str:
        embedded.start()
        self.workers = embedded.workers
        return embedded.address

    def _connect(self, address: str) -> None:
        show_token(PlatformSettings().rpc_token.get_secret_value())
        self._client = RpcClient("sandbox-judge", address, JudgeServiceStub)
        self._upload(self._client)

    def _upload(self, client: RpcClient) -> None:
        self._digest = client.call("UploadTests", UploadTestsRequest(test_sets=[self.test_set])).digests[0]

    def _repair(self, used: RpcClient) -> None:
        """Another judge for one that has ended, once for all threads. Raises SpoError."""
        with self._lock:
            if used is self._client and self._embedded and not self._embedded.alive:
                self._embedded.stop()
                self._connect(self._start_embedded(self._embedded))
            elif used is self._client:
                with contextlib.suppress(NotReady):  # then the next try says so
                    self._upload(used)


def _request(source: bytes, language: str, digest: str, *, stop_early: bool) -> JudgeRequest:
    request = JudgeRequest(
        language=language,
        tests_digest=digest,
        priority=Priority.PRIORITY_EVALUATION,
        want_details=True,
        stop_early=stop_early,
    )
    try:
        request.programs.append(source.decode())
    except UnicodeDecodeError:
        request.raw_programs.append(source)
    return request
