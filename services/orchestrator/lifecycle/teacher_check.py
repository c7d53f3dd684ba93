"""Whether a job's teacher can read what its student writes: the same tokens by the same ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from spo.errors import FieldViolation, InvalidInput
from spo.model.folder import ModelFolder, inspect_model_folder
from spo.spec.algorithm import AlgorithmSpec

POINTER = "/algorithm/teacher/path"
# What gives tokens their ids. Templates and the names of special tokens may differ: prompts are the student's.
DECISIVE = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"})


def teacher_faults(
    student: ModelFolder, algorithm: AlgorithmSpec, here: Callable[[str], Path]
) -> Iterator[FieldViolation]:
    """What speaks against the folder that `algorithm.teacher` names; nothing where it names none.

    here: the folder of a model's path on this machine; raises NotReady while it is fetched.
    """
    if algorithm.teacher is None:
        return
    try:
        teacher = inspect_model_folder(here(algorithm.teacher.path))
    except InvalidInput as error:
        yield from (FieldViolation(POINTER, each.message) for each in error.violations)
        return
    ours, theirs = _digests(student), _digests(teacher)
    if ours != theirs:
        names = ", ".join(sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)))
        yield FieldViolation(POINTER, f"its tokenizer is not the student's, {names} differ: it would read other tokens")
    small, large = (folder.config.get("vocab_size") for folder in (teacher, student))
    if isinstance(small, int) and isinstance(large, int) and small < large:
        yield FieldViolation(POINTER, f"it knows {small} ids of tokens, fewer than the student's {large}")


def _digests(folder: ModelFolder) -> dict[str, bytes]:
    return {file.name: blake3(file.read_bytes()).digest() for file in folder.tokenizer_files if file.name in DECISIVE}
