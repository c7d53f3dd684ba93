"""Every error of the platform.

    SpoError                     code, message, retryable, violations
    |-- InvalidInput             the caller's fault; REST 422, gRPC INVALID_ARGUMENT
    |-- NotFound                 REST 404, gRPC NOT_FOUND
    |-- Conflict                 illegal transition or already there; REST 409, gRPC ABORTED
    |-- PreconditionFailed       REST 412, gRPC FAILED_PRECONDITION
    |   `-- LeaseLost            a fenced caller is no longer the owner
    |-- NotReady                 try again later; REST 503, gRPC UNAVAILABLE, retryable
    |   |-- Unreachable          a service or Redis did not answer in time: names it and its address
    |   `-- StorageUnavailable   a folder cannot be read or written now: names it, and what the system says
    |-- Unauthenticated          a service refused the caller's token; gRPC UNAUTHENTICATED, retryable: tokens change
    |-- ResourceExhausted        too large or too much at once; REST 429, gRPC RESOURCE_EXHAUSTED
    |-- IntegrityError           digest mismatch, malformed file; REST 500, gRPC DATA_LOSS
    `-- InternalError            our fault; REST 500, gRPC INTERNAL

Errors become gRPC statuses only in `spo.rpc`, dead letters only in `spo.messaging.streams`, problem+json only in the
orchestrator.

The catalogue of error codes: what each means, and what to do about it. The type of a problem is `/errors/<code>`, where
the orchestrator serves its entry; `docs/reference/errors.md` has all. A test holds that every code raised anywhere is
in error_codes.txt, and no other: a line with the code and its meaning, below it what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class FieldViolation:
    """What is wrong with one field; pointer is a JSON pointer (RFC 6901)."""

    pointer: str
    message: str


class SpoError(Exception):
    default_code = "internal"
    retryable = False
    # When to come back, as REST tells whoever may.
    retry_after_seconds = 1

    def __init__(self, message: str, *, code: str | None = None, violations: tuple[FieldViolation, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.violations = violations

    def __str__(self) -> str:
        fields = "".join(f"\n  {violation.pointer}: {violation.message}" for violation in self.violations)
        return f"{self.message} [{self.code}]{fields}"


class InvalidInput(SpoError):
    default_code = "invalid_input"


class NotFound(SpoError):
    default_code = "not_found"


class Conflict(SpoError):
    default_code = "conflict"


class PreconditionFailed(SpoError):
    default_code = "precondition_failed"


class LeaseLost(PreconditionFailed):
    default_code = "lease_lost"


class NotReady(SpoError):
    default_code = "not_ready"
    retryable = True


class Unreachable(NotReady):
    default_code = "unreachable"


class StorageUnavailable(NotReady):
    default_code = "storage_unavailable"


class Unauthenticated(SpoError):
    # Retryable: while a platform's token is introduced or changed, its processes have it one after the other.
    default_code = "rpc_unauthenticated"
    retryable = True


class ResourceExhausted(SpoError):
    default_code = "resource_exhausted"
    retryable = True


class IntegrityError(SpoError):
    default_code = "integrity"


class InternalError(SpoError):
    default_code = "internal"


# A folder that is full, or cannot be read or written now, delays a run and ends none.
DELAYING = (ResourceExhausted, StorageUnavailable)

FULL = (errno.ENOSPC, errno.EDQUOT)
# A file system that fails, or is away, as network mounts are: it comes back without a change of ours.
_AWAY = (
    *(
        errno.EIO,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
    ),
    *(errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESHUTDOWN),
    *(errno.ENODEV, errno.ENXIO, errno.ENOLINK, errno.ENOKEY, errno.EKEYEXPIRED, errno.EUCLEAN),
)
# A person's change takes these away again: a mount, an owner, a mode.
_BARRED = (errno.EROFS, errno.EACCES, errno.EPERM)
# Those that sockets have too, which name no file.
_OF_FILES_ALONE = (*FULL, errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EROFS)


def storage_error(error: BaseException, place: str | os.PathLike[str] = "") -> SpoError | None:
    """What an operating system's error on a file means: no room, or a place that cannot be used now; None: neither.

    place: the folder that was read or written; "": where anything may have failed, so that only an error counts that
    names a file, or that only file systems have.
    """
    number = storage_errno(error)
    path = getattr(error, "filename", None)
    if number is None or not (place or path or number in _OF_FILES_ALONE):
        return None
    named = f"{errno.errorcode[number]}: {os.strerror(number)}"
    where = place or path or "a folder"
    at = f", at {path}" if path and path != where else ""
    if number in FULL:
        return ResourceExhausted(f"no space is left in {where} ({named}{at})", code="disk_full")
    return StorageUnavailable(f"{where} cannot be read or written now ({named}{at}); it is tried again")


def storage_errno(error: BaseException) -> int | None:
    """The number of a fault of storage that an error has, or what it comes of; None where there is none."""
    known = (*FULL, *_AWAY, *_BARRED)
    at: BaseException | None = error
    while at is not None and not isinstance(at, SpoError):
        # safetensors' and Rust libraries' errors have no errno, only its text.
        found = getattr(at, "errno", None) or next((each for each in known if f"os error {each})" in str(at)), None)
        if found in known:
            return int(found)
        at = at.__cause__
    return None


def raise_if_storage_is_away(error: BaseException, place: str | os.PathLike[str]) -> None:
    """For readers to whom an unreadable file is its owner's mistake: raise StorageUnavailable where it is none."""
    if storage_errno(error) in _AWAY:
        found = storage_error(error, place)
        assert found
        raise found from error


@contextlib.contextmanager
def storage_faults_named(folder: str | Path, needed_bytes: int = 0) -> Iterator[None]:
    """Raise what may be tried again, naming the folder, where the block finds no room or a place that is not usable.

    That is ResourceExhausted (code "disk_full") with the bytes needed and free, and StorageUnavailable with the error's
    name: read-only, failing, stale, forbidden or away. needed_bytes: about how much the block writes; 0: unknown.
    """
    try:
        yield
    except Exception as error:
        found = storage_error(error, folder)
        if found is None:
            raise
        if storage_errno(error) in FULL:
            needed = f"{needed_bytes} bytes are needed, " if needed_bytes else ""
            message = f"no space is left in {folder}: {needed}{_free_bytes(Path(folder))} are free"
            found = ResourceExhausted(message, code="disk_full")
        raise found from error


def _free_bytes(folder: Path) -> int:
    there = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    return shutil.disk_usage(there).free


@dataclass(frozen=True)
class CatalogueEntry:
    """What a code means, and what to do."""

    meaning: str
    remedy: str


# Read when it is first asked for: this module is imported by children that raise and show nothing.
@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Every code's entry, by code."""
    lines = Path(__file__).with_name("error_codes.txt").read_text(encoding="utf-8").splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return {line.partition(": ")[0]: CatalogueEntry(line.partition(": ")[2], remedy.strip()) for line, remedy in pairs}
