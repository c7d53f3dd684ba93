"""Makes problems with reasoning-gym: `python -m spo.tasks.generate`, JSON on standard input and output.

A process of its own: some generators depend on the hash seed of their process, take minutes, or much memory.

{"generators": [{"name": "chain_sum", "settings": {"max_terms": 4}, "parts": [[seed, count], ...]}]}
{"made": [[[entry, ...], ...], ...]}         for each generator and part; no question of a part is in a later one
{"faults": [[0, "settings", "why"], ...]}    instead, where a generator cannot be made
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import resource
import sys
from collections.abc import Iterator
from typing import Protocol, TypedDict

from pydantic import JsonValue

from spo.observability import memory_limit_bytes

# Of the memory that this process and those beside it may take, a quarter; whatever the machine has, not more than this.
MEMORY_BYTES = 2 << 30
MEMORY_SHARE = 4
LEAST_MEMORY_BYTES = 256 << 20
# What whoever asked has to hold of the answer.
ANSWER_BYTES = 64 << 20
# A setting may be so large, or so many times its default: counts by the first, numbers within problems by the second.
LARGEST_SETTING, TIMES_DEFAULT = 100_000, 1000
# A generator may depend on its size, so it is always the same; further problems have further seeds.
BLOCK = 128
# Indices that are tried for each problem wanted: small spaces repeat themselves.
TRIES = 8
# question, answer and metadata, as JSON has them.
Entry = dict[str, JsonValue]
# The first mixes others, as `generators` does; the scorer of the second takes any answer but an empty one for "True";
# the third follows no seed.
NOT_OFFERED = frozenset({"composite", "game_of_life_halting", "list_functions"})


class Wanted(TypedDict):
    """A generator with its settings, and for each part a seed and how many problems."""

    name: str
    settings: dict[str, object]
    parts: list[tuple[int, int]]


class Request(TypedDict):
    generators: list[Wanted]


class Answer(TypedDict, total=False):
    """One of both."""

    made: list[list[list[Entry]]]
    faults: list[tuple[int, str, str]]


class _TooMuch(Exception):
    """What the problems of a generator take is more than may be answered."""


class _Indexed(Protocol):
    def __getitem__(self, index: int, /) -> object: ...


def names() -> list[str]:
    """The data sets of reasoning-gym that problems can be made with."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - NOT_OFFERED)


def _settings_of(name: str) -> set[str]:
    from reasoning_gym.factory import DATASETS

    return {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}


def made(request: Request) -> Answer:
    """The answer to a request."""
    faults = [fault for index, wanted in enumerate(request["generators"]) for fault in _faults(index, wanted)]
    if faults:
        return {"faults": faults}
    parts: list[list[list[Entry]]] = []
    for index, wanted in enumerate(request["generators"]):
        try:
            parts.append(list(_parts(wanted)))
        except (MemoryError, _TooMuch) as error:
            why = str(error) or "its problems take more memory than there is for them: ask for smaller"
            return {"faults": [(index, "settings", why)]}
    return {"made": parts}


def _faults(index: int, wanted: Wanted) -> Iterator[tuple[int, str, str]]:
    name = wanted["name"]
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; `spo tasks generators` lists them"
        yield index, "name", f"reasoning-gym has no data set {name}{hint}"
        return
    if unknown := sorted(wanted["settings"].keys() - _settings_of(name)):
        yield index, f"settings/{unknown[0]}", f"{name} has the settings {', '.join(sorted(_settings_of(name)))}"
        return
    if large := _large_settings(wanted):
        yield index, f"settings/{large[0]}", f"{large[0]} of {name} is too large: at most {large[1]}"
        return
    try:
        _ = _dataset(wanted, 0)[0]
    except Exception as error:  # whatever its configuration says
        yield index, "settings", f"{name} cannot be made: {str(error) or type(error).__name__}"[:500]


def _large_settings(wanted: Wanted) -> tuple[str, int] | None:
    """A setting that is too large, with its bound; None where each is within its own."""
    from reasoning_gym.factory import DATASETS

    fields = {field.name: field.default for field in dataclasses.fields(DATASETS[wanted["name"]][1])}
    for name, value in wanted["settings"].items():
        default = fields[name]
        most = max(LARGEST_SETTING, TIMES_DEFAULT * abs(int(default)) if isinstance(default, int | float) else 0)
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, int | float) and abs(number) > most for number in numbers):
            return name, most
    return None


def _parts(wanted: Wanted) -> Iterator[list[Entry]]:
    seen: set[str] = set()
    characters = 0
    for seed, count in wanted["parts"]:
        entries: list[Entry] = []
        for entry in _entries(wanted, seed, TRIES * count + BLOCK):
            if len(entries) == count:
                break
            question = str(entry["question"])
            if question not in seen:
                seen.add(question)
                entries.append(entry)
                characters += len(json.dumps(entry))
                if characters > ANSWER_BYTES:
                    raise _TooMuch(
                        f"its problems take more than {ANSWER_BYTES >> 20} MiB: ask for fewer, or for smaller"
                    )
        yield entries


def _entries(wanted: Wanted, seed: int, most: int) -> Iterator[Entry]:
    for first in range(0, most, BLOCK):
        dataset = _dataset(wanted, seed + first)
        for index in range(BLOCK):
            # Only what JSON keeps: the judge gets the entry so.
            yield json.loads(json.dumps(dataset[index], default=str))


def _dataset(wanted: Wanted, seed: int) -> _Indexed:
    from reasoning_gym.factory import create_dataset

    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in wanted["settings"].items()}
    dataset: _Indexed = create_dataset(wanted["name"], **settings, seed=seed, size=BLOCK)
    return dataset


def main() -> int:
    """Answer the request; returns the exit status."""
    most = max(LEAST_MEMORY_BYTES, min(MEMORY_BYTES, memory_limit_bytes() // MEMORY_SHARE))
    # What it writes to: libraries reserve address space that they never use.
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    request = json.load(sys.stdin)
    # Some generators print.
    with contextlib.redirect_stdout(io.StringIO()):
        answer = made(request)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
