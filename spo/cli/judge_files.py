"""Programs and tests as files, turned into what a judge takes; every refusal names the file and what to do."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spo.errors import FieldViolation, InvalidInput, NotFound
from spo.v1.verdict_pb2 import Checker, Limits, TestCase, TestSet

LARGEST_PROGRAM_BYTES = 1 << 20
# What one gRPC message carries, less some room.
LARGEST_TESTS_BYTES = 60 << 20
MOST_VIOLATIONS = 10
LANGUAGES_BY_SUFFIX = {
    ".py": "python",
    ".cpp": "cpp",
    ".cc": "cpp",
    ".cxx": "cpp",
    ".c++": "cpp",
    ".c": "c",
    ".java": "java",
}
CHECKERS = {
    Checker.Name(value).removeprefix("CHECKER_").lower(): value
    for value in Checker.values()
    if value not in (Checker.CHECKER_UNSPECIFIED, Checker.CHECKER_SPECIAL)
}
_TEST_KEYS = {"stdin", "stdout", "public"}


@dataclass(frozen=True)
class ProgramFile:
    """A program's file and the language it is judged in."""

    path: Path
    language: str

    def read(self) -> bytes:
        """The source. Raises NotFound when it has vanished, InvalidInput when it cannot be read."""
        try:
            with self.path.open("rb") as file:
                return file.read(LARGEST_PROGRAM_BYTES)
        except FileNotFoundError:
            raise _absent(self.path) from None
        except OSError as error:
            raise InvalidInput(f"cannot read {self.path}: {error.strerror}", code="unreadable_program") from None


def find_programs(paths: Sequence[Path], language: str | None) -> list[ProgramFile]:
    """The program files, all there and of a known language. Raises NotFound, InvalidInput."""
    return [ProgramFile(path, language or language_of(_require_file(path))) for path in map(_require_file, paths)]


def language_of(path: Path) -> str:
    """The language that a file's name tells. Raises InvalidInput (code "unknown_language")."""
    language = LANGUAGES_BY_SUFFIX.get(path.suffix.lower())
    if language is None:
        known = ", ".join(LANGUAGES_BY_SUFFIX)
        raise InvalidInput(
            f"cannot tell the language of {path} by its name (known: {known}); say --language", code="unknown_language"
        )
    return language


def read_tests(path: Path, limits: Limits, checker: str, absolute: float, relative: float) -> tuple[TestSet, set[str]]:
    """The test set of a tests.json and the keys in it that mean nothing here. Raises NotFound, InvalidInput.

    checker: one of CHECKERS, or the path of a special judge's source.
    """
    tests, unknown = _parse_tests(path)
    test_set = TestSet(tests=tests, limits=limits, absolute_tolerance=absolute, relative_tolerance=relative)
    if checker in CHECKERS:
        test_set.checker = CHECKERS[checker]
    elif Path(checker).suffix or Path(checker).exists():
        (program,) = find_programs([Path(checker)], None)
        test_set.checker = Checker.CHECKER_SPECIAL
        test_set.checker_program = program.read()
        test_set.checker_language = program.language
    else:
        known = ", ".join(CHECKERS)
        raise InvalidInput(f"no checker {checker!r}; known: {known}, or a program's file", code="unknown_checker")
    return test_set, unknown


def _parse_tests(path: Path) -> tuple[list[TestCase], set[str]]:
    try:
        size_bytes = _require_file(path).stat().st_size
        if size_bytes > LARGEST_TESTS_BYTES:
            raise _bad_tests(f"{path} has {size_bytes >> 20} MiB; at most {LARGEST_TESTS_BYTES >> 20} are judged by")
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise _bad_tests(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _bad_tests(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except (ValueError, RecursionError) as error:
        raise _bad_tests(f"{path} is not JSON: {error}") from None
    if not isinstance(document, list) or not document:
        found = "an empty list" if document == [] else f"a {type(document).__name__}"
        raise _bad_tests(f'{path} must be a list of {{"stdin": ..., "stdout": ...}}; it is {found}')
    violations = [violation for number, entry in enumerate(document) for violation in _wrong_with(number, entry)]
    if violations:
        raise InvalidInput(
            f'{path} must be a list of {{"stdin": text, "stdout": text}}',
            code="bad_tests",
            violations=tuple(violations[:MOST_VIOLATIONS]),
        )
    return [_test_case(entry) for entry in document], {key for entry in document for key in entry} - _TEST_KEYS


def _wrong_with(number: int, entry: Any) -> list[FieldViolation]:
    if not isinstance(entry, dict):
        return [FieldViolation(f"/{number}", f"must be an object, is {_named(entry)}")]
    wrong = [
        FieldViolation(f"/{number}/{key}", f"must be text, is {_named(entry[key])}" if key in entry else "is missing")
        for key in ("stdin", "stdout")
        if not _is_text(entry.get(key))
    ]
    if not isinstance(entry.get("public", False), bool):
        wrong.append(FieldViolation(f"/{number}/public", "must be true or false"))
    return wrong


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(value: Any) -> str:
    match value:
        case str():
            return "text with half a surrogate pair"
        case float() if not math.isfinite(value):
            return "no JSON number"
        case None:
            return "null"
        case _:
            return f"a {type(value).__name__}"


def _test_case(entry: dict[str, Any]) -> TestCase:
    return TestCase(
        stdin=entry["stdin"].encode(), stdout=entry["stdout"].encode(), public=bool(entry.get("public", False))
    )


def _require_file(path: Path) -> Path:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _absent(path) from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {path}: {error}", code="unreadable_file") from None
    if not stat.S_ISREG(mode):
        raise InvalidInput(f"{path} is not a file", code="not_a_file")
    return path


def _absent(path: Path) -> NotFound:
    return NotFound(f"no file {path}", code="file_not_found")


def _bad_tests(message: str) -> InvalidInput:
    return InvalidInput(message, code="bad_tests")
