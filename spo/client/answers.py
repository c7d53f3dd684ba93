"""What the SDK makes of the API's answers: models, the SpoErrors of problem documents, and folders that arrive as
tar.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypedDict, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from spo import errors

Answer = TypeVar("Answer", bound=BaseModel)

_BY_STATUS: dict[int, type[errors.SpoError]] = {
    404: errors.NotFound,
    409: errors.Conflict,
    412: errors.PreconditionFailed,
    413: errors.ResourceExhausted,
    429: errors.ResourceExhausted,
    502: errors.NotReady,
    503: errors.NotReady,
    504: errors.NotReady,
}


class RequestOptions(TypedDict, total=False):
    """What httpx takes beside method and path; parameters that are None are left out, timeout is in seconds."""

    json: object
    content: bytes
    params: Mapping[str, object]
    headers: Mapping[str, str]
    timeout: float | httpx.Timeout


def error_of(response: httpx.Response) -> errors.SpoError:
    """The SpoError that a problem+json answer (RFC 9457) stands for."""
    try:
        problem = response.json()
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    server_fault = errors.InternalError if response.status_code >= 500 else errors.InvalidInput
    kind = _BY_STATUS.get(response.status_code, server_fault)
    violations = tuple(
        errors.FieldViolation(str(fault.get("pointer", "")), str(fault.get("message", "")))
        for fault in problem.get("errors") or ()
    )
    message = problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}"
    return kind(str(message), code=problem.get("code"), violations=violations)


def parsed(answer: type[Answer], content: object) -> Answer:
    """The content as a model. Raises InternalError (code "unexpected_answer") naming the first field that is wrong."""
    try:
        return answer.model_validate(content, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        place = "/" + "/".join(map(str, first["loc"]))
        message = f"the API's answer is no {answer.__name__}: {place}: {first['msg']}"
        raise errors.InternalError(message, code="unexpected_answer") from None


def content_of(response: httpx.Response) -> object:
    """What a successful answer says: decoded JSON, else its text, None when it is empty.

    Raises InternalError (code "unexpected_answer") for what calls itself JSON and is not.
    """
    if not response.content:
        return None
    if "json" not in response.headers.get("Content-Type", ""):
        return response.text
    try:
        found: object = response.json()
    except ValueError as error:
        raise errors.InternalError(f"the API's answer is not JSON: {error}", code="unexpected_answer") from None
    return found


def pause_asked(response: httpx.Response) -> float:
    """Seconds that the API asks to wait before the next try (Retry-After), 0 when it does not say."""
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdigit() else 0.0


class ReceivedFolder:
    """Takes an archive of plain files in pieces of any size; use as a context manager.

    Raises InvalidInput (code "unwritable_file") when the folder is there already or cannot be written, Unreachable
    (code "api_unreachable") when the archive broke off, and IntegrityError when it is none.
    """

    def __init__(self, target: Path) -> None:
        self.target = target.absolute()
        self._waiting = bytearray()
        self._file: BinaryIO | None = None
        self._left = self._padding = 0
        self._ended = False

    def __enter__(self) -> Self:
        if self.target.exists():
            raise errors.InvalidInput(f"{self.target} is there already; name a folder to make", code="unwritable_file")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._writing = Path(tempfile.mkdtemp(prefix=f".{self.target.name}-", dir=self.target.parent))
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if self._file:
                self._file.close()
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._unwritable(failure) from None
        finally:
            shutil.rmtree(self._writing, ignore_errors=True)

    def take(self, piece: bytes) -> None:
        """Write what of the archive has come."""
        self._waiting += piece
        try:
            while self._step():
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def _step(self) -> bool:
        """Use up some of what waits; False when more must come first."""
        if self._ended:
            self._waiting.clear()
            return False
        if self._file:
            written = self._file.write(self._waiting[: self._left])
            del self._waiting[:written]
            self._left -= written
            if self._left:
                return False
            self._file.close()
            self._file = None
        if len(self._waiting) < self._padding + tarfile.BLOCKSIZE:
            return False
        head = bytes(self._waiting[self._padding : self._padding + tarfile.BLOCKSIZE])
        del self._waiting[: self._padding + tarfile.BLOCKSIZE]
        self._begin(head)
        return True

    def _begin(self, head: bytes) -> None:
        try:
            member = tarfile.TarInfo.frombuf(head, "utf-8", "strict")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            self._ended = True
            return
        except tarfile.TarError as error:
            raise errors.IntegrityError(f"what arrives is no tar archive: {error}") from None
        if not member.isreg() or member.name != Path(member.name).name or member.name.startswith("."):
            raise errors.IntegrityError(f"{member.name[:100]!r} in the archive is no plain file")
        self._file = (self._writing / member.name).open("xb")
        self._left, self._padding = member.size, -member.size % tarfile.BLOCKSIZE

    def _finish(self) -> None:
        if not self._ended:
            raise errors.Unreachable("the download broke off before its end; try again", code="api_unreachable")
        self._writing.chmod(0o755)
        self._writing.rename(self.target)

    def _unwritable(self, error: OSError) -> errors.InvalidInput:
        return errors.InvalidInput(f"cannot write {self.target}: {error.strerror}", code="unwritable_file")
