"""Makes problems with reasoning-gym: `python -m spo.tasks.sources.generate`, JSON on standard input and output.

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

MEMORY_BYTES = 8 << 30
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
    return {"made": [list(_parts(wanted)) for wanted in request["generators"]]}


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
    try:
        _ = _dataset(wanted, 0)[0]
    except Exception as error:  # whatever its configuration says
        yield index, "settings", f"{name} cannot be made: {str(error) or type(error).__name__}"[:500]


def _parts(wanted: Wanted) -> Iterator[list[Entry]]:
    seen: set[str] = set()
    for seed, count in wanted["parts"]:
        entries: list[Entry] = []
        for entry in _entries(wanted, seed, TRIES * count + BLOCK):
            if len(entries) == count:
                break
            question = str(entry["question"])
            if question not in seen:
                seen.add(question)
                entries.append(entry)
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
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    request = json.load(sys.stdin)
    # Some generators print.
    with contextlib.redirect_stdout(io.StringIO()):
        answer = made(request)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
