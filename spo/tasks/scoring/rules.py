"""What a composition must be, so that a score follows from its parts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from spo.errors import FieldViolation, InvalidInput
from spo.spec.verifier import MOST_PARTS, PART_NAME
from spo.tasks.scoring.penalties import SCRIPTS
from spo.v1.verdict_pb2 import Part, TestSet

MOST_WEIGHT = 1000.0


def require_composable(test_set: TestSet, require_part: Callable[[TestSet], None]) -> None:
    """Raises InvalidInput naming each field by which no score follows, those of parts at their own place.

    require_part: raises InvalidInput on a part's test set that cannot be judged by.
    """
    faults = list(_faults_of_whole(test_set))
    for number, part in enumerate(test_set.composition.parts):
        at = f"/composition/parts/{number}"
        faults += [FieldViolation(f"{at}{pointer}", message) for pointer, message in _faults_of_part(part)]
        if part.HasField("verifier"):
            faults += _faults_of_verifier(f"{at}/verifier", part.verifier, require_part)
    if faults:
        raise InvalidInput("this composition makes no score", violations=tuple(faults))


def _faults_of_whole(test_set: TestSet) -> Iterator[FieldViolation]:
    parts = test_set.composition.parts
    if not 0 < len(parts) <= MOST_PARTS:
        yield FieldViolation("/composition/parts", f"must be between 1 and {MOST_PARTS} parts")
    elif not any(part.weight > 0 for part in parts if part.HasField("verifier")):
        yield FieldViolation("/composition/parts", "must hold a verifier with a weight above 0")
    names = [part.name for part in parts]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield FieldViolation(f"/composition/parts/{number}/name", "must not be the name of another part")


def _faults_of_part(part: Part) -> Iterator[tuple[str, str]]:
    is_penalty = not part.HasField("verifier")
    most = 1.0 if is_penalty else MOST_WEIGHT
    if not re.fullmatch(PART_NAME, part.name):
        yield "/name", "must be letters, digits, _ and -, at most 64, a letter first"
    if not (math.isfinite(part.weight) and 0 <= part.weight <= most):
        yield "/weight", f"must be finite, not negative and at most {most:g}"
    if is_penalty and part.gate:
        yield "/gate", "must not be set for a penalty"
    match part.WhichOneof("kind"):
        case None:
            yield "", "must be a verifier or a penalty"
        case "length":
            if not 0 <= part.length.free_characters < part.length.most_characters:
                yield "/length/most_characters", "must be more than free_characters, which is not negative"
        case "language":
            if part.language.script not in SCRIPTS:
                yield "/language/script", f"must be one of {', '.join(SCRIPTS)}"


def _faults_of_verifier(
    at: str, verifier: TestSet, require_part: Callable[[TestSet], None]
) -> Iterator[FieldViolation]:
    if verifier.HasField("composition"):
        yield FieldViolation(f"{at}/composition", "must not be within another composition")
        return
    try:
        require_part(verifier)
    except InvalidInput as error:
        yield from (FieldViolation(f"{at}{fault.pointer}", fault.message) for fault in error.violations)
