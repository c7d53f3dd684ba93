"""The state of a platform outside Redis: the place where the orchestrator keeps its files, and whose a state folder
is.

Where the orchestrator keeps its files: a folder on disk, or a bucket; the names in it are the same.
A file is whole or absent. In a bucket each has a key of its own, a write is one PUT, and what was written is read by
the next call. A bucket that does not answer in time is an Unreachable with the code storage_unavailable.

Whose a state folder is: all processes of one platform share a lock on it, and another platform is refused.
A platform is what one Redis holds: its id is a field of `redis_keys.platform`. `platform.lock` in the folder names the
platform in JSON, and is locked (flock, shared) by every process that writes there for as long as it lives; the name
changes only under the exclusive lock, so while nobody else is there. Processes on other machines share no locks where
the file system keeps none: the orchestrator renews the file's time, and a name that was renewed within
FOREIGN_SECONDS counts as alive. Launchers hold `launcher.lock` exclusively.
A bucket, or the part of one that a URL names, is held by an object of the same name, which is written on condition that
nobody else wrote it meanwhile; its age is told by the bucket's own clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from redis import RedisError
from ulid import ULID

from spo import redis_keys
from spo.errors import Conflict, InvalidInput, Unreachable
from spo.manifest_folder import remove_tree
from spo.messaging.redis_client import RedisClient, public_address
from spo.observability import get_logger
from spo.service.settings import PlatformSettings
from spo.spec.section import record_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore


# Of one request, and from when on none is tried again.
REQUEST_SECONDS = 15
CONNECT_SECONDS = 3
RETRIES = 3
RETRY_SECONDS = 10
# A bucket that was away is asked again after so long: meanwhile nobody waits for it.
AWAY_SECONDS = 3.0
PART_BYTES = 5 << 20

log = get_logger("state")

LOCK_FILE = "platform.lock"
LAUNCHER_LOCK_FILE = "launcher.lock"
CODE = "state_folder_in_use"
RENEW_SECONDS = 10.0
# A platform on another machine that has not renewed its name for so long is gone.
FOREIGN_SECONDS = 60.0
# Others hold the exclusive lock for as long as it takes to write a name, a dying launcher for as long as it dies.
TURN_SECONDS = 5.0
PAUSE_SECONDS = 0.05
# Within it a process of this platform says in an emptied Redis whose it is, where one lives.
SAID_SECONDS = 25.0
CLAIM_TRIES = 5
MOST_BYTES = 4096
LOOPBACK = ("127.", "localhost", "[::1]", "::1", "/")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_REMEDY = "Stop it, or give this one a state folder of its own: SPO_STATE_PATH, `spo up --name other --state FOLDER`"

# KEYS: the platform's hash.  ARGV: id for a Redis that has none.  Returns the id.
_PLATFORM_ID = """#!lua flags=allow-oom
redis.call('HSETNX', KEYS[1], 'id', ARGV[1])
return redis.call('HGET', KEYS[1], 'id')
"""


class StatePlace(Protocol):
    """Files by names such as jobs/ID.json. All calls raise OSError, or Unreachable for a bucket that is away."""

    def read(self, name: str) -> bytes | None:
        """What a file holds; None where there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file; it is safe when this returns."""

    def put(self, name: str, source: Path) -> None:
        """As `write`, of what a file of this machine holds."""

    def fetch(self, name: str, destination: Path) -> None:
        """Bring a file to this machine. Raises FileNotFoundError."""

    def names(self, folder: str) -> list[str]:
        """The names of all files below a folder, sorted."""

    def remove(self, name: str) -> None:
        """One that is not there is removed."""

    def remove_folder(self, folder: str) -> None:
        """All files below it."""


class StateFolder:
    """A folder of this machine, or one that is mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".writing-{os.getpid()}-{threading.get_ident()}-{path.name}")
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            # A full disk has no room for a half of it; one that answers nothing keeps it until the next write.
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def put(self, name: str, source: Path) -> None:
        self.write(name, source.read_bytes())

    def fetch(self, name: str, destination: Path) -> None:
        destination.write_bytes((self._root / name).read_bytes())

    def names(self, folder: str) -> list[str]:
        found = (path for path in (self._root / folder).rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self._root)) for path in found if not path.name.startswith(".writing-"))

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        remove_tree(self._root / folder)


class StateBucket:
    """A bucket, or a part of one; credentials and endpoint come from the usual AWS_* variables."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = _opened(self.url)
        self._lock = threading.Lock()
        self._away: tuple[float, str] = (float("-inf"), "")

    def read(self, name: str) -> bytes | None:
        import obstore

        try:
            with self._reaching():
                return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        import obstore

        with self._writing():
            obstore.put(self._store, name, content, use_multipart=False)

    def put(self, name: str, source: Path) -> None:
        import obstore

        with self._writing():
            obstore.put(self._store, name, source, chunk_size=PART_BYTES)

    def fetch(self, name: str, destination: Path) -> None:
        import obstore

        with self._reaching(), destination.open("wb") as file:
            for part in obstore.get(self._store, name).stream(min_chunk_size=PART_BYTES):
                file.write(part)

    def names(self, folder: str) -> list[str]:
        import obstore

        with self._reaching():
            pages = obstore.list(self._store, prefix=f"{folder}/")
            return sorted(entry["path"] for page in pages for entry in page)

    def remove(self, name: str) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError), self._reaching():
            obstore.delete(self._store, name)

    def remove_folder(self, folder: str) -> None:
        for name in self.names(folder):
            self.remove(name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        from obstore.exceptions import NotFoundError

        with self._reaching():
            try:
                yield
            except NotFoundError as error:
                raise self._unavailable(_first_line(error)) from None

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        from obstore.exceptions import BaseError, NotFoundError

        with self._lock:
            since, why = self._away
        if time.monotonic() - since < AWAY_SECONDS:
            raise self._unavailable(why)
        try:
            yield
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from None
        except BaseError as error:
            why = _first_line(error)
            with self._lock:
                self._away = (time.monotonic(), why)
            raise self._unavailable(why) from None

    def _unavailable(self, why: str) -> Unreachable:
        return Unreachable(f"the bucket {self.url} does not answer: {why}", code="storage_unavailable")


def _first_line(error: Exception) -> str:
    # What follows is the library's own state.
    return str(error).strip().split("\n", 1)[0][:300]


def state_at(place: str | Path) -> StatePlace:
    """The place named by a path or a URL. Raises InvalidInput when it is none."""
    return StateBucket(str(place)) if "://" in str(place) else StateFolder(Path(place))


def _opened(url: str, retries: int = RETRIES) -> ObjectStore:
    try:
        import obstore
        from obstore.exceptions import BaseError
    except ImportError:
        raise InvalidInput(f"what is kept at {url} needs the package obstore", code="state_store_url") from None
    try:
        store: ObjectStore = obstore.store.from_url(
            url,
            client_options={
                "allow_http": True,
                "timeout": f"{REQUEST_SECONDS}s",
                "connect_timeout": f"{CONNECT_SECONDS}s",
            },
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    except (BaseError, ValueError) as error:
        raise InvalidInput(f"nothing can be kept at {url}: {error}", code="state_store_url") from None
    return store


@dataclass(frozen=True)
class FolderOwner:
    """What a lock file says: the platform (its id), and the process that wrote it."""

    platform: str = ""
    pid: int = 0
    host: str = ""
    # Of the kernel: containers of one machine have it in common.
    boot: str = ""
    service: str = ""
    address: str = ""
    redis: str = ""
    # Its network: containers of one machine have each their own, and each its own loopback.
    net: str = ""

    def __str__(self) -> str:
        redis = f", Redis {self.redis}" if self.redis else ""
        return f"{self.service or 'a process'} at {self.address or '?'} (pid {self.pid} on {self.host}{redis})"


class FolderLock:
    """One folder's lock file, open in this process."""

    def __init__(self, folder: Path, file: str = LOCK_FILE) -> None:
        self.folder = folder
        self._path = folder / file
        self._descriptor: int | None = None
        self._writable = True
        self._said = False
        self._platform = ""
        self._guard = threading.Lock()

    def claim(self, owner: FolderOwner) -> None:
        """Hold the folder with the other processes of a platform.

        Raises Conflict (code "state_folder_in_use") where another platform holds it.
        """
        with self._guard:
            if not self._opened():
                return
            deadline = time.monotonic() + TURN_SECONDS
            alone = self._lock(fcntl.LOCK_EX)
            if alone is not False and self._writable:
                self._name(owner, locks=alone is True)
            while self._lock(fcntl.LOCK_SH) is False:
                self._pause(deadline)
            # While this lock is held nobody can write another name.
            found = self.owner()
            if found.platform != owner.platform and (self._writable or (found.platform and alone is not True)):
                self._lock(fcntl.LOCK_UN)
                raise self._refusal(found)
            self._platform = owner.platform

    def is_held(self) -> bool:
        """Whether processes of the platform that the file names live, as far as can be seen from here."""
        with self._guard:
            if not self._opened():
                return False
            alone = self._lock(fcntl.LOCK_EX)
            if alone:
                self._lock(fcntl.LOCK_UN)
            if alone is False or not self._writable:
                return alone is False
            seen = alone is True and self.owner().boot == _boot()
            return not seen and self._age_seconds() < FOREIGN_SECONDS

    def hold_alone(self, owner: FolderOwner) -> None:
        """Hold the folder as the only process. Raises Conflict (code "state_folder_in_use")."""
        with self._guard:
            deadline = time.monotonic() + TURN_SECONDS
            while self._opened() and self._lock(fcntl.LOCK_EX) is False:
                found = self.owner()
                if found.boot != _boot() or _lives(found.pid):
                    raise self._refusal(found)
                self._pause(deadline)
            self._write(owner)

    def renew(self) -> None:
        """Say to other machines that the platform named here lives.

        Raises OSError; Conflict (code "state_folder_in_use") where another machine's took the folder meanwhile: this
        process stood still for so long, or both began at once, on a file system whose locks do not reach that far.
        """
        if self._descriptor is None or not self._writable:
            return
        found = self.owner()
        if self._platform and found.platform not in ("", self._platform):
            raise self._refusal(found, "it took the folder while this process did not renew its name")
        os.utime(self._descriptor)

    def owner(self) -> FolderOwner:
        """What the file says; nobody where it says nothing."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return record_of(FolderOwner, json.loads(self._path.read_bytes()[:MOST_BYTES]))
        return FolderOwner()

    def close(self) -> None:
        """Let the folder go."""
        with self._guard:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _opened(self) -> bool:
        """Whether there is a file to lock; a folder that this process cannot write may have none."""
        if self._descriptor is not None:
            return True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
                raise
            self._writable = False
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self._path, os.O_RDONLY)
        return self._descriptor is not None

    def _lock(self, kind: int) -> bool | None:
        """Whether it was had at once; None on a file system that keeps no locks."""
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            # Over NFS an exclusive lock needs a file that is open for writing.
            if error.errno == errno.EBADF and not self._writable:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            if not self._said:
                what = "the file system keeps no locks; a second platform is only seen by the time of its lock file"
                log.warning(what, folder=str(self.folder), reason=str(error))
            self._said = True
            return None
        return True

    def _name(self, owner: FolderOwner, *, locks: bool) -> None:
        """Write the platform's name where the one that is there is its own, or that of a platform that is gone."""
        found = self.owner()
        if found.platform and found.platform != owner.platform:
            seen = locks and found.boot == owner.boot
            if not seen and (age := self._age_seconds()) < FOREIGN_SECONDS:
                self._lock(fcntl.LOCK_UN)
                raise self._refusal(found, f"it said so {age:.0f} s ago; it counts as gone after {FOREIGN_SECONDS:g} s")
            what = "the state folder was another platform's, which is gone"
            log.warning(what, folder=str(self.folder), before=found.platform, now=owner.platform)
        self._write(owner)

    def _write(self, owner: FolderOwner) -> None:
        if self._descriptor is None or not self._writable:
            return
        text = json.dumps(asdict(owner)).encode()
        # In place: the lock is on this very file. Spaces over what a longer one left.
        size = os.fstat(self._descriptor).st_size
        os.pwrite(self._descriptor, text.ljust(size) if size < MOST_BYTES else text, 0)

    def _age_seconds(self) -> float:
        """Since the file was renewed, by the clock of the file system alone."""
        with tempfile.TemporaryFile(dir=self.folder) as now:
            return os.fstat(now.fileno()).st_mtime - self._path.stat().st_mtime

    def _pause(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise self._refusal(self.owner())
        time.sleep(PAUSE_SECONDS)

    def _refusal(self, found: FolderOwner, detail: str = "") -> Conflict:
        pids = _holders(self._path)
        also = f"; held by the processes {', '.join(map(str, pids))}" if pids and pids != [found.pid] else ""
        detail = f"; {detail}" if detail else ""
        return Conflict(
            f"the state folder {self.folder.absolute()} is another platform's: {found}{also}{detail}. {_REMEDY}",
            code=CODE,
        )


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _net() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/net").st_ino)
    return ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _holders(path: Path) -> list[int]:
    """Processes that hold locks on a file, as the kernel lists them; none where it does not."""
    pids = set()
    with contextlib.suppress(OSError, ValueError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "->" not in words and words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode:
                pids.add(int(words[4]))
    return sorted(pids - {os.getpid()})


class BucketLock:
    """The lock object of a bucket, or a part of one: a lease by conditional writes, as this process knows it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # Soon done: heartbeats wait for a claim, and the renewal tries again.
        self._store = _opened(self.url, retries=1)
        self._owner = FolderOwner()

    def claim(self, owner: FolderOwner) -> None:
        """Hold the bucket with the other processes of a platform; one that is away is claimed with the next renewal.

        Raises Conflict (code "state_folder_in_use") where another platform holds it.
        """
        self._owner = owner
        try:
            self.renew()
        except OSError as error:
            log.warning("whose a bucket is will be known when it answers", bucket=self.url, reason=str(error))

    def renew(self) -> None:
        """Say that the platform lives, where nobody of it has done so for RENEW_SECONDS.

        Raises OSError; Conflict (code "state_folder_in_use") where another platform has the bucket.
        """
        from obstore.exceptions import BaseError

        if not self._owner.platform:
            return
        try:
            for _ in range(CLAIM_TRIES):
                if self._tried():
                    return
        except BaseError as error:
            raise OSError(f"the bucket {self.url} does not answer: {_first_line(error)}") from None
        raise OSError(f"the lock of the bucket {self.url} is written by others at every try")

    def owner(self) -> FolderOwner:
        """Whom the object names; nobody where there is none. Raises obstore's BaseError."""
        return self._found()[0]

    def close(self) -> None:
        """The other processes of the platform may go on; without them the lease runs out."""
        self._owner = FolderOwner()

    def _tried(self) -> bool:
        """Whether the platform holds the bucket; False where somebody else wrote the object in between."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

        found, e_tag, written = self._found()
        own = found.platform == self._owner.platform
        age = 0.0 if e_tag is None else (self._now() - written).total_seconds()
        if own and age < RENEW_SECONDS:
            return True
        if found.platform and not own:
            if age < FOREIGN_SECONDS:
                raise Conflict(
                    f"the bucket {self.url} is another platform's: {found}; it said so {age:.0f} s ago, and counts as "
                    f"gone after {FOREIGN_SECONDS:g} s. {_REMEDY}, or another bucket or prefix",
                    code=CODE,
                )
            what = "the bucket was another platform's, which is gone"
            log.warning(what, bucket=self.url, before=found.platform, now=self._owner.platform)
        text = json.dumps(asdict(self._owner)).encode()
        try:
            obstore.put(self._store, LOCK_FILE, text, mode="create" if e_tag is None else {"e_tag": e_tag})
        except (AlreadyExistsError, PreconditionError, NotFoundError):
            return False
        return True

    def _found(self) -> tuple[FolderOwner, str | None, datetime]:
        """Whom the object names, and its tag (None: there is none) and time."""
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            stored = obstore.get(self._store, LOCK_FILE)
            content = bytes(stored.bytes())[:MOST_BYTES]
        except (NotFoundError, FileNotFoundError):
            return FolderOwner(), None, datetime.now(UTC)
        owner = FolderOwner()
        with contextlib.suppress(ValueError, TypeError):
            owner = record_of(FolderOwner, json.loads(content))
        return owner, stored.meta["e_tag"], stored.meta["last_modified"]

    def _now(self) -> datetime:
        """By the bucket's clock."""
        import obstore

        beside = f"{LOCK_FILE}.now"
        obstore.put(self._store, beside, b"", use_multipart=False)
        return obstore.head(self._store, beside)["last_modified"]


@dataclass
class HeldFolders:
    """The state folder, and weights, checkpoints and experience where they are elsewhere, in folders or buckets."""

    owner: FolderOwner
    locks: list[FolderLock] = field(default_factory=list)
    buckets: list[BucketLock] = field(default_factory=list)
    _client: RedisClient | None = None

    @classmethod
    def of(cls, settings: PlatformSettings, service: str, address: str) -> HeldFolders:
        """Those of the settings; not held yet."""
        own = settings.state_path.absolute()
        named = (settings.state_place, settings.weight_place, settings.checkpoint_place, settings.experience_place)
        local = [Path(place).absolute() for place in named if "://" not in place]
        elsewhere = [folder for folder in dict.fromkeys(local) if not folder.is_relative_to(own)]
        owner = FolderOwner("", os.getpid(), socket.gethostname(), _boot(), service, address, net=_net())
        found = cls(owner, [FolderLock(folder) for folder in (own, *elsewhere)])
        for url in dict.fromkeys(place for place in named if _is_bucket(place)):
            try:
                found.buckets.append(BucketLock(url))
            except InvalidInput as error:
                # The experience store alone takes further kinds of places.
                log.warning("a place cannot be held: no other platform may use it", place=url, reason=error.message)
        return found

    @property
    def _all(self) -> list[FolderLock | BucketLock]:
        return [*self.locks, *self.buckets]

    @property
    def platform(self) -> str:
        """The platform that they are held for; "" while that is not known."""
        return self.owner.platform

    def hold_for(self, client: RedisClient, redis_url: str) -> HeldFolders:
        """Hold them for the platform of a Redis. Raises Conflict (code "state_folder_in_use"), redis.RedisError."""
        redis = public_address(redis_url)
        said = client.hget(redis_keys.platform(), "id")
        self.confirm(_say_platform(client, said.decode() if said else self._proposed(client, redis)), redis)
        self._client = client
        return self

    def _proposed(self, client: RedisClient, redis: str) -> str:
        """Whose a Redis is that does not say so: emptied, that of this folder's platform, or one that begins.

        Another server may have the same address, in another network: the `redis` of two compose projects, a loopback
        of a container. While processes of the folder's platform live, one of them says in its own Redis whose it is.
        """
        known, own = self.locks[0].owner(), self.owner
        if not known.platform or known.redis != redis:
            return str(ULID())
        this_machine = known.boot == own.boot and known.net in ("", own.net)
        if redis.startswith(LOOPBACK):
            return known.platform if this_machine else str(ULID())
        deadline = time.monotonic() + SAID_SECONDS
        while self.locks[0].is_held():
            if said := client.hget(redis_keys.platform(), "id"):
                return said.decode()
            if time.monotonic() > deadline:
                return str(ULID())
            time.sleep(0.2)
        return known.platform

    def confirm(self, platform: str, redis: str = "") -> None:
        """This is the platform of this process. Raises Conflict (code "state_folder_in_use")."""
        if platform and platform != self.platform:
            owner = replace(self.owner, platform=platform, redis=redis)
            for lock in self._all:
                lock.claim(owner)
            self.owner = owner

    def close(self) -> None:
        """Let them go."""
        for lock in self._all:
            lock.close()

    def renew_until(self, stop: threading.Event) -> None:
        """A worker: renew the name for other machines, and in a Redis that was emptied.

        Raises Conflict where a folder or bucket was taken meanwhile.
        """
        while not stop.wait(RENEW_SECONDS):
            with contextlib.suppress(RedisError):
                if self._client and self.platform:
                    _say_platform(self._client, self.platform)
            for lock in self._all:
                # A disk or bucket that fails is told by whoever needs it.
                with contextlib.suppress(OSError):
                    lock.renew()


def _say_platform(client: RedisClient, platform: str) -> str:
    """Whose a Redis is from now on: whose it was already, else this platform's."""
    return cast(bytes, client.eval(_PLATFORM_ID, 1, redis_keys.platform(), platform)).decode()


def _is_bucket(place: str) -> bool:
    # Those of one process, or of the file system, are nobody else's or have locks.
    return "://" in place and not place.startswith(("memory://", "file://"))


@contextlib.contextmanager
def launcher_of(folder: Path, name: str, address: str) -> Iterator[None]:
    """Be the only launcher of a folder. Raises Conflict (code "state_folder_in_use")."""
    lock = FolderLock(folder, LAUNCHER_LOCK_FILE)
    try:
        lock.hold_alone(FolderOwner("", os.getpid(), socket.gethostname(), _boot(), f"spo up --name {name}", address))
        yield
    finally:
        lock.close()
