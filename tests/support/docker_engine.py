"""A Docker engine for tests: a running one, else one of the test's own where it may start it; and an image without a
registry, made of this machine's interpreter and what it links to.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest
import requests
from docker.errors import DockerException

INTERPRETER = os.path.realpath(sys.executable)
PREFIX = Path(sysconfig.get_paths()["stdlib"]).parent.parent
LEFT_OUT = {"site-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__"}
START_SECONDS = 60


def skip(reason: str) -> None:
    pytest.skip(f"NOTHING IS TESTED WITH DOCKER: {reason}")


def answers(url: str) -> bool:
    try:
        engine = docker.DockerClient(base_url=url, timeout=5)
        try:
            return bool(engine.ping())
        finally:
            engine.close()
    except (DockerException, requests.RequestException):
        return False


@contextmanager
def running_engine() -> Iterator[str]:
    """The address of an engine, as DOCKER_HOST has it; skips, and says so, where there is none."""
    url = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if answers(url):
        yield url
        return
    dockerd = shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin")
    if dockerd is None or os.geteuid() != 0:
        skip(f"no engine answers at {url}, and none can be started here")
    folder = Path(tempfile.mkdtemp(prefix="spo-engine-"))
    url = f"unix://{folder}/socket"
    command = f"{dockerd} --host {url} --data-root {folder}/state --exec-root {folder}/run --pidfile {folder}/pid"
    command += " --bridge none --iptables=false --ip6tables=false --storage-driver vfs"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command.split(), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                skip(f"dockerd does not start here: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def interpreter_archive(*programs: str) -> bytes:
    """A file system with this Python, its library, some programs and what they link to, where they are here."""
    modules = sorted((PREFIX / "lib").glob("python3*/lib-dynload/*.so"))
    linked = subprocess.run(
        ["ldd", INTERPRETER, *map(os.path.realpath, programs), *modules], capture_output=True, text=True, check=True
    ).stdout
    words = {word for line in linked.splitlines() for word in line.split() if not word.endswith(":")}
    files = {INTERPRETER, *programs, *(word for word in words if word.startswith("/") and ".so" in word)}
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        parents = {str(each) for path in (stdlib, *files) for each in Path(path).parents}
        for name in sorted({*parents, "/proc", "/dev", "/sys", "/tmp", "/etc", "/usr", "/judge"} - {"/"}):
            folder = tarfile.TarInfo(name.lstrip("/"))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "/tmp" else 0o755
            archive.addfile(folder)
        archive.add(stdlib, filter=lambda entry: None if Path(entry.name).name in LEFT_OUT else entry)
        for path in files:
            entry = archive.gettarinfo(os.path.realpath(path), arcname=path.lstrip("/"))
            with open(os.path.realpath(path), "rb") as file:
                archive.addfile(entry, file)
    return content.getvalue()
