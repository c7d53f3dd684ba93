"""Zygotes inside containers of a Docker engine, optionally under another runtime such as gVisor's runsc.

A container serves as many programs as a zygote does and ends with it: no network, read-only root, private tmpfs, no
capabilities, no new privileges, an unprivileged user, limits of memory and processes. Inside, the zygote guards each
program with seccomp, Landlock and resource limits as everywhere. Its control channel and the programs' pipes come
through a socket in a folder that judge and engine both see, so outputs still come through pipes that the judge holds.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException, NotFound

from services.sandbox_judge.executor import JudgeFault
from services.sandbox_judge.isolation import (
    FIRST_PROGRAM_UID,
    START_SECONDS,
    Launch,
    Preload,
    Zygote,
    container_launch,
    jail_sources,
)
from services.sandbox_judge.settings import Settings

ENGINE_SECONDS = 30
PROCESSES = 128
SCRATCH = "size=64m,nr_inodes=4096,mode=1777"
LABEL = "spo.sandbox-judge"
_FAILURES = (DockerException, requests.RequestException, OSError)


class ContainerZygote(Zygote):
    """A zygote in a container of its own. Raises JudgeFault when the engine or the zygote does not start."""

    def __init__(self, worker: int, settings: Settings, preload: Preload | None = None) -> None:
        self.programs = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._folder = Path(tempfile.mkdtemp(prefix="spo-judge-", dir=settings.docker_folder or None))
        try:
            launch = container_launch(settings.docker_python, preload)
            self._inside = launch.inside
            self._process = _Container(self._folder, launch, worker, settings)  # type: ignore[assignment]
            self._control = self._accept()
        except _FAILURES as error:
            self._log.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise JudgeFault(f"the Docker engine did not start a container: {error}") from error
        self.pid = self._process.pid
        self.landlock_abi = self._greet(launch.setting)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> socket.socket:
        """The zygote's end of the control channel, which it asks for in the shared folder."""
        container: Any = self._process
        with container.listener:
            container.listener.settimeout(START_SECONDS)
            try:
                control: socket.socket = container.listener.accept()[0]
            except OSError as error:
                reason = container.last_words()
                container.kill()
                raise OSError(f"{error}: {reason}") from error
        control.settimeout(None)
        return control


class _Container:
    """A running container, as far as a zygote wants to know: it can be waited for and killed."""

    stdin = stdout = None

    def __init__(self, folder: Path, launch: Launch, worker: int, settings: Settings) -> None:
        folder.chmod(0o755)
        shutil.copytree(jail_sources(), folder / "services" / "sandbox_judge" / "jail")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(folder / "control"))
        (folder / "control").chmod(0o666)
        self.listener.listen(1)
        user = f"{FIRST_PROGRAM_UID + worker}:{FIRST_PROGRAM_UID + worker}"
        try:
            self._engine = docker.from_env(timeout=ENGINE_SECONDS)
            self._container = self._engine.containers.create(
                settings.docker_image,
                list(launch.command),
                environment=launch.environment,
                volumes={str(folder): {"bind": "/judge", "mode": "ro"}},
                runtime=settings.docker_runtime or None,
                mem_limit=settings.docker_memory_bytes,
                memswap_limit=settings.docker_memory_bytes,
                user=user,
                tmpfs={"/tmp": SCRATCH},
                labels={LABEL: str(os.getpid())},
                auto_remove=True,
                stdin_open=True,
                network_mode="none",
                ipc_mode="private",
                shm_size=1 << 16,
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                pids_limit=PROCESSES,
                working_dir="/",
            )
            self._start()
        except _FAILURES:
            self.listener.close()
            raise

    def _start(self) -> None:
        try:
            self._container.start()
            self._container.reload()
        except _FAILURES:
            self.kill()  # one that has not started does not remove itself
            raise
        self.pid = int(self._container.attrs["State"]["Pid"])

    def wait(self, timeout: float) -> None:
        """Return when the container is gone. Raises subprocess.TimeoutExpired."""
        try:
            self._container.wait(timeout=timeout, condition="removed")
        except NotFound:
            pass
        except (requests.Timeout, requests.ConnectionError) as error:
            raise subprocess.TimeoutExpired("container", timeout) from error
        self._engine.close()

    def kill(self) -> None:
        """End it and everything in it; what the engine does not end now, it ends with its own next start."""
        try:
            self._container.remove(force=True)
        except (DockerException, requests.RequestException):
            return

    def last_words(self) -> str:
        """The end of what the container said."""
        try:
            said: bytes = self._container.logs(tail=20)
        except (DockerException, requests.RequestException) as error:
            return str(error)
        return said.decode(errors="replace").strip()
