"""Episodes in containers of a Docker engine: an agent's image, unmodified, with no network but its session's address.

A container has a loopback and nothing else. On that loopback the runner listens itself, from outside, and passes on
what goes to the session's own paths: so an agent reaches neither the platform's other paths nor anything else. The
root is read-only, the folder of the episode and /tmp are in memory, and memory, processes and processor are limited.

A process beside the runner removes its containers when the runner ends, even by kill -9.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import httpx

from spo.errors import InvalidInput, NotReady, PreconditionFailed

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

LABEL = "spo.agents.runner"
# Compose labels what belongs to a project with its name.
COMPOSED = "com.docker.compose.project"
FOLDER = "/episode"
# On the container's own loopback.
PORT = 8081
ENGINE_SECONDS = 60
# For all that is left of a runner; then what cannot be removed stays, and is said.
REMOVAL_SECONDS = 300.0
# Of what an agent has printed the engine keeps this, and of its folder and /tmp memory holds this.
MOST_PRINTED = "8m"
SCRATCH = "size=256m,nr_inodes=65536,mode=1777"
PROCESSES = 512
# Calls of an agent at once; more wait. A session has fewer.
MOST_AT_ONCE = 16
MOST_BODY_BYTES = 32 << 20
# A request has to arrive within it; an answer may take longer, since a call may wait for a replica.
REQUEST_SECONDS = 60.0
ANSWER_SECONDS = 3600.0
_CLONE_NEWNET = 0x40000000
# Headers that are about one connection, and not about the request.
_OF_CONNECTIONS = frozenset(("connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"))
# The container waits for the runner to listen.
_BEGIN = f'read -r begun < {FOLDER}/.begin && exec "$@"'


@dataclass(frozen=True)
class ContainerLimits:
    """Where episodes run: the image, bytes of memory, processors."""

    image: str
    memory_bytes: int = 2 << 30
    processors: float = 1.0

    @classmethod
    def parse(cls, text: str) -> ContainerLimits:
        """IMAGE[,memory_mib=2048][,processors=1]. Raises InvalidInput."""
        image, *parts = text.split(",")
        said = dict(part.partition("=")[::2] for part in parts)
        try:
            memory, processors = int(said.pop("memory_mib", 2048)), float(said.pop("processors", 1.0))
        except ValueError as error:
            raise InvalidInput(f"--image {text}: {error}") from None
        if said or not image or memory < 64 or not 0.01 <= processors <= 1024:
            raise InvalidInput(f"--image is IMAGE[,memory_mib=2048][,processors=1], not {text}")
        return cls(image, memory << 20, processors)


class Remover:
    """A process that removes a runner's containers, and its networks, once this one has ended, however it ends.

    mark: LABEL of the containers, or how the names of their Compose projects begin. Raises as `Containers`.
    """

    def __init__(self, mark: str) -> None:
        engine_of_environment().close()
        # It reads until this process has ended.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spo.cli.containers", mark], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        """Have it remove what is left, and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(REMOVAL_SECONDS + ENGINE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Containers:
    """Starts episodes in containers of one engine, which go with this process. Safe from several threads.

    Raises PreconditionFailed (code "package_missing"), NotReady (code "no_containers").
    """

    def __init__(self, limits: ContainerLimits) -> None:
        self.limits = limits
        self._engine = engine_of_environment()
        try:
            self._engine.images.get(limits.image)
        except OSError as error:
            raise NotReady(f"the engine has no image {limits.image}: {error}", code="no_containers") from error
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self._remover = Remover(self._mark)

    def close(self) -> None:
        """Remove what is left."""
        self._remover.close()
        self._engine.close()

    def start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], base_url: str
    ) -> EpisodeContainer:
        """Start a command with the files of a folder, read-only, in /episode. base_url: of its session."""
        begin = folder / ".begin"
        os.mkfifo(begin, 0o644)
        files = {str(each): {"bind": f"{FOLDER}/{each.name}", "mode": "ro"} for each in folder.iterdir()}
        container = self._engine.containers.create(
            self.limits.image,
            [*command],
            entrypoint=["/bin/sh", "-c", _BEGIN, "sh"],
            environment={**environment, "HOME": FOLDER, **addresses(base_url)},
            volumes=files,
            tmpfs={FOLDER: SCRATCH, "/tmp": SCRATCH},
            working_dir=FOLDER,
            labels={LABEL: self._mark},
            network_mode="none",
            ipc_mode="private",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=self.limits.memory_bytes,
            memswap_limit=self.limits.memory_bytes,
            nano_cpus=int(self.limits.processors * 1e9),
            pids_limit=PROCESSES,
            log_config={"Type": "json-file", "Config": {"max-size": MOST_PRINTED, "max-file": "1"}},
        )
        return EpisodeContainer(container, base_url, begin)


def engine_of_environment() -> docker.DockerClient:
    """The engine that the variables of Docker's own programs name. Raises as `Containers`."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError:
        message = "the package docker is not installed: `pip install docker`"
        raise PreconditionFailed(message, code="package_missing") from None
    try:
        engine = docker.from_env(timeout=ENGINE_SECONDS)
        engine.ping()
    except (DockerException, OSError) as error:
        raise NotReady(f"no Docker engine answers: {error}", code="no_containers") from error
    return engine


def addresses(base_url: str) -> dict[str, str]:
    """Where the clients of OpenAI and Anthropic find the session from inside."""
    inside = f"http://127.0.0.1:{PORT}{urlsplit(base_url).path}"
    return {
        "OPENAI_BASE_URL": inside,
        "OPENAI_API_BASE": inside,
        "ANTHROPIC_BASE_URL": inside.removesuffix("/v1"),
        "SPO_PROBLEM": f"{FOLDER}/problem.json",
    }


class EpisodeContainer:
    """A command in a container, as long as it runs."""

    def __init__(self, container: Container, base_url: str, begin: Path) -> None:
        self._container = container
        self._door: SessionDoor | None = None
        self._begin = os.open(begin, os.O_RDWR)
        try:
            container.start()
            container.reload()
            self._door = SessionDoor(int(container.attrs["State"]["Pid"]), base_url)
            os.write(self._begin, b"\n")
        except BaseException:
            self.end()
            raise

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None while it runs, after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            self._container.reload()
            state = self._container.attrs["State"]
            if state["Status"] in ("exited", "dead"):
                return int(state["ExitCode"])
            if time.monotonic() >= until:
                return None
            time.sleep(min(0.1, seconds))

    def stop(self) -> None:
        """End all that it has started; what it has printed stays."""
        from docker.errors import APIError

        # It may have ended already.
        with suppress(APIError):
            self._container.kill()

    def printed(self, most: int) -> str:
        """The end of what it has printed."""
        said: bytes = self._container.logs()
        return said.decode(errors="replace").strip()[-most:]

    def end(self) -> None:
        """Remove it."""
        from docker.errors import NotFound

        if self._door is not None:
            self._door.close()
        os.close(self._begin)
        with suppress(NotFound):
            self._container.remove(force=True, v=True)


class SessionDoor:
    """Listens on the loopback of a process's network and passes on what goes to one session."""

    def __init__(self, pid: int, base_url: str) -> None:
        self._server = _Server(network_listener(pid, PORT), base_url)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; calls that are under way end with the container's sockets."""
        self._server.closing = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.platform.close()


def network_listener(pid: int, port: int) -> socket.socket:
    """A socket that listens on the loopback of a process's network. Raises NotReady where that is denied."""
    found: list[socket.socket | OSError] = []

    def listen() -> None:
        # The network is the thread's alone, and the socket keeps it.
        try:
            with open(f"/proc/{pid}/ns/net", "rb") as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            found.append(socket.create_server(("127.0.0.1", port), backlog=MOST_AT_ONCE))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=listen, name="network")
    thread.start()
    thread.join()
    (listener,) = found
    if isinstance(listener, OSError):
        message = f"the runner cannot listen in the container's network: {listener}; is its engine on this machine?"
        raise NotReady(message, code="no_containers") from listener
    return listener


class _Server(ThreadingHTTPServer):
    """So many requests at once and no more: others wait to be accepted."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, base_url: str) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.platform = httpx.Client(timeout=httpx.Timeout(REQUEST_SECONDS, read=ANSWER_SECONDS))
        at = urlsplit(base_url)
        self.origin = f"{at.scheme}://{at.netloc}"
        # A path of plain words below the session's: none that leads out of it once dots and slashes are worked out.
        session = re.escape(at.path.removesuffix("/v1"))
        self.allowed = re.compile(session + r"(\.[A-Za-z0-9_-]{1,100})?/v1(/[a-z_]+)+(\?[A-Za-z0-9_=&%.-]*)?")
        self.closing = False
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)

    def process_request(self, request: object, client_address: object) -> None:
        while not self._room.acquire(timeout=0.5):
            if self.closing:
                return self.shutdown_request(request)  # type: ignore[arg-type]
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """An agent that goes away in the middle is nobody's error."""


class _Handler(BaseHTTPRequestHandler):
    """Passes one request on, and its answer as it comes."""

    timeout = REQUEST_SECONDS

    def do_POST(self) -> None:
        self._pass_on()

    def do_GET(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        server = cast(_Server, self.server)
        length = self.headers.get("Content-Length", "0")
        if not server.allowed.fullmatch(self.path):
            return self._refuse(404, "only the session's own paths are here", retry=False)
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            return self._refuse(411, "a request says how long it is", retry=False)
        if int(length) > MOST_BODY_BYTES:
            return self._refuse(413, f"a request has at most {MOST_BODY_BYTES} bytes", retry=False)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            return None
        headers = [(name, said) for name, said in self.headers.items() if name.lower() not in _OF_CONNECTIONS]
        url = f"{server.origin}{self.path}"
        try:
            with server.platform.stream(self.command, url, headers=headers, content=body) as answer:
                self._answer(answer)
        except httpx.HTTPError as error:
            # Before its head was sent; behind it the connection ends, which clients take for what it is.
            if not self.sent:
                self._refuse(503, f"the platform does not answer: {type(error).__name__}", retry=True)

    sent = False

    def _answer(self, answer: httpx.Response) -> None:
        self.sent = True
        self.send_response(answer.status_code)
        for name, said in answer.headers.multi_items():
            if name.lower() not in _OF_CONNECTIONS - {"content-length"}:
                self.send_header(name, said)
        self.end_headers()
        for part in answer.iter_raw():
            self.wfile.write(part)
            self.wfile.flush()

    def _refuse(self, status: int, message: str, *, retry: bool) -> None:
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-should-retry", str(retry).lower())
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """The session's trace says what was called; addresses may hold its key."""


def remove_all(mark: str) -> None:
    """Remove the containers of a runner that has ended, and what its engine still made for it. Raises NotReady."""
    until = time.monotonic() + REMOVAL_SECONDS
    engine = engine_of_environment()
    looks_without = 0
    while looks_without < 3:
        left = engine.containers.list(all=True, filters={"label": f"{LABEL}={mark}"}, ignore_removed=True)
        composed = engine.containers.list(all=True, filters={"label": COMPOSED}, ignore_removed=True)
        left += [each for each in composed if each.labels[COMPOSED].startswith(f"{mark}-")]
        looks_without = 0 if left else looks_without + 1
        if left and time.monotonic() > until:
            names = ", ".join(each.name for each in left)
            raise NotReady(f"the engine does not remove {names} in {REMOVAL_SECONDS:g} s", code="no_containers")
        for each in left:
            # It may go by itself meanwhile.
            with suppress(OSError):
                each.remove(force=True, v=True)
        time.sleep(0.5)
    for network in engine.networks.list(names=[f"{mark}-"]):
        if network.name.startswith(f"{mark}-"):
            with suppress(OSError):
                network.remove()
    engine.close()


if __name__ == "__main__":
    sys.stdin.read()
    try:
        remove_all(sys.argv[1])
    except (NotReady, OSError) as error:
        # OSError: the engine has gone while it was asked.
        sys.exit(f"containers of a runner are not removed: {error}")
