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


@contextmanager
def compose_engine() -> Iterator[str]:
    """An engine with what Harbor needs beside it, its program among them; skips, and says so, where there is none."""
    if shutil.which("harbor") is None:
        skip("there is no program harbor (pip install harbor, with Python 3.12)")
    with running_engine() as url:
        command = ["docker", "--host", url, "compose", "version"]
        if shutil.which("docker") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            skip("there is no Docker Compose, which Harbor starts its containers with")
        yield url


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


def harbor_task(engine: docker.DockerClient, folder: Path, instruction: str, wanted: str) -> None:
    """A task of Harbor, and its image without a registry: hello.txt is to hold what is wanted."""
    programs = ("bash", "cat", "chmod", "chown", "cp", "env", "find", "id", "ls", "mkdir", "mv", "rm", "sh", "sleep")
    image = "spo-test-harbor"
    if not engine.images.list(image):
        archive = interpreter_archive(*(f"/bin/{name}" for name in (*programs, "tar", "tee", "touch")))
        engine.api.import_image_from_data(archive, repository=image)
    files = {
        "task.toml": '[task]\nname = "spo/hello"\n[agent]\ntimeout_sec = 600.0\n[verifier]\ntimeout_sec = 120.0\n',
        "instruction.md": f"{instruction}\n",
        "environment/Dockerfile": f"FROM {image}\nCOPY passwd /etc/passwd\nWORKDIR /app\n",
        "environment/passwd": "root:x:0:0:root:/root:/bin/bash\n",
        "solution/solve.sh": f"#!/bin/bash\necho '{wanted}' > hello.txt\n",
        "tests/test.sh": "#!/bin/bash\n"
        f"if [ \"$(cat hello.txt)\" = '{wanted}' ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
