"""A state folder belongs to one platform: what two processes may open is held, and a second platform is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import obstore
import pytest

from spo.errors import Conflict
from spo.local.launcher import LauncherSettings, LocalPlatform, server_command
from spo.messaging.redis_client import connect
from spo.service import state
from spo.service.settings import PlatformSettings
from spo.service.state import FOREIGN_SECONDS, LOCK_FILE, BucketLock, FolderLock, FolderOwner, HeldFolders
from spo.testing.peers import wait_until
from tests.conftest import require
from tests.support.two_hosts import two_hosts

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from pathlib import Path
from spo.service import state
state.SAID_SECONDS = 2.0
from spo.messaging.redis_client import connect
from spo.service.settings import PlatformSettings
from spo.service.state import HeldFolders
settings = PlatformSettings(
    redis_url=sys.argv[1], state_path=Path(sys.argv[2]), **dict(place.split("=") for place in sys.argv[3:])
)
held = HeldFolders.of(settings, "holder", "127.0.0.1:1").hold_for(connect(settings.redis_url, 5), settings.redis_url)
print(held.platform, flush=True)
time.sleep(600)
"""


def held(url: str, state: Path, **places: str) -> HeldFolders:
    settings = PlatformSettings.model_validate({"redis_url": url, "state_path": state, **places})
    with connect(url, 5) as client:
        return HeldFolders.of(settings, "second", "127.0.0.1:2").hold_for(client, url)


@contextmanager
def holder(url: str, state: Path, *places: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder for the platform of a Redis."""
    command = [sys.executable, "-c", HOLDER, url, str(state), *places]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline().strip(), "the holder could not hold the folder"
            yield process
        finally:
            process.kill()


@pytest.fixture
def other_redis(redis_server: str) -> Iterator[str]:
    """Another platform's Redis: another database of the same server."""
    url = redis_server.removesuffix("/0") + "/9"
    with connect(url, 5) as client:
        client.delete("spo:platform")
        yield url
        client.delete("spo:platform")


@pytest.mark.usefixtures("redis_client")
def test_processes_of_one_platform_share_and_another_platform_is_refused_by_name(
    redis_server: str, other_redis: str, tmp_path: Path
) -> None:
    with holder(redis_server, tmp_path) as process:
        held(redis_server, tmp_path).close()
        with pytest.raises(Conflict, match=rf"pid {process.pid}.*Stop it, or give") as refused:
            held(other_redis, tmp_path)
        assert refused.value.code == "state_folder_in_use"


@pytest.mark.parametrize("place", ["weight_store_url", "checkpoint_store_url", "state_store_url", "experience_url"])
@pytest.mark.usefixtures("redis_client")
def test_folders_elsewhere_are_held_too(place: str, redis_server: str, other_redis: str, tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    with holder(redis_server, tmp_path / "a", f"{place}={shared}"), pytest.raises(Conflict, match="shared is another"):
        held(other_redis, tmp_path / "b", **{place: shared})


@pytest.mark.usefixtures("redis_client")
def test_a_folder_whose_platform_is_gone_is_taken_over(redis_server: str, other_redis: str, tmp_path: Path) -> None:
    with holder(redis_server, tmp_path):
        pass

    taken = held(other_redis, tmp_path)

    assert json.loads((tmp_path / LOCK_FILE).read_text())["platform"] == taken.platform
    taken.close()


@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.usefixtures("redis_client")
def test_an_emptied_redis_of_a_network_is_the_platforms_where_a_process_of_it_says_so(
    renews: bool, redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another network the same address may be another server's."""
    for name, value in (("LOOPBACK", ("nowhere",)), ("RENEW_SECONDS", 0.05), ("SAID_SECONDS", 1.0)):
        monkeypatch.setattr(state, name, value)
    first, stop = held(redis_server, tmp_path), threading.Event()
    thread = threading.Thread(target=first.renew_until if renews else stop.wait, args=(stop,) if renews else ())
    with ExitStack() as expected, connect(redis_server, 5) as client:
        first._client = client
        thread.start()
        expected.callback(thread.join, 20)
        expected.callback(stop.set)
        client.delete("spo:platform")
        if not renews:
            expected.enter_context(pytest.raises(Conflict, match="is another platform's"))
        assert held(redis_server, tmp_path).platform == first.platform


@pytest.mark.usefixtures("redis_client")
def test_an_emptied_redis_is_still_the_platform_of_its_folder(redis_server: str, tmp_path: Path) -> None:
    with holder(redis_server, tmp_path), connect(redis_server, 5) as client:
        before = held(redis_server, tmp_path)
        client.delete("spo:platform")
        after = held(redis_server, tmp_path)
    for each in (before, after):
        each.close()
    assert after.platform == before.platform


@pytest.mark.parametrize(("age", "refused"), [(0.0, True), (FOREIGN_SECONDS / 2, True), (FOREIGN_SECONDS + 5, False)])
def test_a_platform_on_another_machine_is_alive_while_it_renews_its_name(
    age: float, refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text(json.dumps({"platform": "theirs", "host": "far", "boot": "another", "pid": 7}))
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    lock = FolderLock(tmp_path)
    with ExitStack() as expected:
        if refused:
            expected.enter_context(pytest.raises(Conflict, match="pid 7 on far"))
        lock.claim(FolderOwner("ours", boot="here"))
    assert lock.owner().platform == ("theirs" if refused else "ours")
    lock.close()


def test_a_file_system_without_locks_refuses_by_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    FolderLock(tmp_path).claim(FolderOwner("ours", boot="here"))
    FolderLock(tmp_path).claim(FolderOwner("ours", boot="there"))
    with pytest.raises(Conflict, match="counts as gone after"):
        FolderLock(tmp_path).claim(FolderOwner("theirs", boot="here"))


def test_a_platform_that_stood_still_hears_that_another_machine_took_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.claim(FolderOwner("ours", boot="here"))
    first.renew()
    os.utime(tmp_path / LOCK_FILE, (0, 0))
    second.claim(FolderOwner("theirs", boot="there"))
    second.renew()
    with pytest.raises(Conflict, match="took the folder while this process did not renew"):
        first.renew()


@pytest.mark.parametrize("address", ["127.0.0.1", "10.9.9.9"])
def test_platforms_of_two_networks_whose_redis_have_one_address_do_not_share_a_folder(
    address: str, tmp_path: Path
) -> None:
    """Two compose projects, two releases on one claim, or two containers: `redis` of each is another server."""
    url = f"redis://{address}:6379/0"
    with ExitStack() as running:
        try:
            hosts = running.enter_context(two_hosts())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"NOT TESTED, two networks: none can be made here: {error}")
        for number, host in enumerate(hosts):
            host.run(require("ip"), "address", "add", "10.9.9.9/32", "dev", "lo")
            server = host.on(
                [*server_command(6379, tmp_path / f"redis-{number}"), "--bind", address, "--protected-mode", "no"]
            )
            process = running.enter_context(subprocess.Popen(server, stdout=subprocess.DEVNULL))
            running.callback(process.kill)
        said = []
        for host in hosts:
            command = host.on([sys.executable, "-c", HOLDER, url, str(tmp_path / "state")])
            process = running.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
            running.callback(process.kill)
            assert process.stdout
            said.append(process.stdout.readline() if not said else process.stdout.read())
    assert "is another platform's: holder at 127.0.0.1:1" in said[1]


def test_a_damaged_lock_file_names_nobody_and_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_bytes(b"\xff\x00{" * 100)
    lock = FolderLock(tmp_path)
    lock.claim(FolderOwner("ours"))
    assert lock.owner().platform == "ours"
    lock.close()


@pytest.mark.parametrize("service", ["orchestrator", "replay_buffer", "inference", "value_estimation"])
@pytest.mark.usefixtures("redis_client")
def test_a_service_that_is_started_by_itself_is_refused(
    service: str, redis_server: str, other_redis: str, tmp_path: Path
) -> None:
    environment = os.environ | {"SPO_REDIS_URL": other_redis, "SPO_STATE_PATH": str(tmp_path)}
    with holder(redis_server, tmp_path):
        ran = subprocess.run(
            [sys.executable, "-m", f"services.{service}"],
            cwd=ROOT,
            env=environment | {"SPO_ORCHESTRATOR_HTTP_PORT": "0"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode != 0
    assert "state_folder_in_use" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr


def test_a_second_launcher_is_refused_whatever_its_name(tmp_path: Path) -> None:
    """Before it starts anything, through another path to the folder too, and at once: the first one lives."""
    (tmp_path / "link").symlink_to(tmp_path / "state")
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom spo.service.state import launcher_of\n"
        "with launcher_of(Path(sys.argv[1]), 'first', 'http://127.0.0.1:1'): print('up', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "state")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout
            assert first.stdout.readline() == "up\n"
            for state in ("state", "link"):
                second = LocalPlatform("other", tmp_path / state, LauncherSettings(runs_path=tmp_path / "runs"))
                with pytest.raises(Conflict, match=rf"--name first.*pid {first.pid}") as refused, second:
                    pass
                assert refused.value.code == "state_folder_in_use"
                assert second.children == []
        finally:
            first.kill()


def test_a_second_launcher_is_refused_in_a_container_where_the_first_ones_pid_means_nothing(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom spo.local.launcher import LauncherSettings, LocalPlatform\n"
        "from spo.errors import Conflict\n"
        "runs = Path(sys.argv[1])\n"
        "try:\n with LocalPlatform('first', runs / 'state', LauncherSettings(runs_path=runs)): print('up')\n"
        "except Conflict as error: print(error.code, error)\n"
    )
    command = [require("unshare"), "--pid", "--fork", "--mount-proc", sys.executable, "-c", script, str(tmp_path)]
    with state.launcher_of(tmp_path / "state", "first", "http://127.0.0.1:1"):
        (tmp_path / "first").mkdir()
        shown = json.dumps({"name": "first", "pid": os.getpid(), "pid_created": 1.0, "http_url": "http://127.0.0.1:1"})
        (tmp_path / "first" / "state.json").write_text(shown)
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        if "unshare failed" in ran.stderr:
            pytest.skip(f"NOT TESTED, a container's processes: none can be made here: {ran.stderr}")
        assert ran.stdout.startswith("state_folder_in_use"), ran.stdout + ran.stderr
        assert f"pid {os.getpid()}" in ran.stdout
        assert (tmp_path / "first" / "state.json").read_text() == shown


def test_a_second_redis_is_refused_its_folder(free_port: int, tmp_path: Path) -> None:
    first = subprocess.Popen(server_command(free_port, tmp_path), stdout=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "redis.pid").exists, "the server's pid file")
        with pytest.raises(Conflict, match=f"Redis with pid {first.pid}"):
            server_command(1, tmp_path)
    finally:
        first.kill()
        first.wait(20)
    assert server_command(1, tmp_path)


def platform(name: str) -> FolderOwner:
    return FolderOwner(name, os.getpid(), "machine", "boot", "orchestrator", "127.0.0.1:1")


def test_a_bucket_is_one_platforms_and_a_prefix_of_it_may_be_anothers(
    bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, same, other = (BucketLock(bucket_url) for _ in range(3))
    first.claim(platform("one"))
    same.claim(platform("one"))
    BucketLock(f"{bucket_url}/other").claim(platform("two"))
    with pytest.raises(Conflict, match=r"bucket .* is another platform's: orchestrator at 127") as refused:
        other.claim(platform("two"))
    assert refused.value.code == "state_folder_in_use"

    monkeypatch.setattr(state, "FOREIGN_SECONDS", -1.0)
    other.claim(platform("two"))
    assert first.owner().platform == "two"
    monkeypatch.setattr(state, "FOREIGN_SECONDS", 60.0)
    with pytest.raises(Conflict):
        same.renew()
    other.renew()


def test_of_platforms_that_race_for_a_bucket_one_has_it(bucket_url: str) -> None:
    def claim(number: int) -> bool:
        try:
            BucketLock(bucket_url).claim(platform(str(number)))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(claim, range(8))) == 1


def test_a_damaged_or_removed_lock_object_is_written_anew(bucket_url: str) -> None:
    lock, store = BucketLock(bucket_url), obstore.store.from_url(bucket_url, client_options={"allow_http": True})
    for content in (b"", b"no json", b"[1]"):
        obstore.put(store, LOCK_FILE, content)
        lock.claim(platform("one"))
        assert lock.owner().platform == "one"
    obstore.delete(store, LOCK_FILE)
    lock.renew()
    assert lock.owner().platform == "one"


def test_a_bucket_that_is_away_holds_up_no_start(
    bucket_url: str, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port}")
    lock = BucketLock(bucket_url)
    lock.claim(platform("one"))
    with pytest.raises(OSError, match="does not answer"):
        lock.renew()


def test_a_settings_bucket_is_held_and_a_place_that_no_lock_knows_is_named(
    bucket_url: str, redis_server: str, other_redis: str, tmp_path: Path
) -> None:
    url = f"{bucket_url}/weights"
    with ExitStack() as stack:
        stack.callback(held(redis_server, tmp_path / "one", weight_store_url=url).close)
        with pytest.raises(Conflict, match="bucket"):
            held(other_redis, tmp_path / "two", weight_store_url=url)
    unknown = PlatformSettings(state_path=tmp_path, experience_url="unknown://place")
    assert HeldFolders.of(unknown, "test", "").buckets == []
