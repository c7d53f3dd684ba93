"""What is taken out of captured text before it is stored anywhere: patterns of a tenant's own, and a hook."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points

import regex
from pydantic import BaseModel, ConfigDict, Field

from spo.errors import FieldViolation, InvalidInput, SpoError

ENTRY_POINTS = "spo.redaction"
# Of all rules together on one completion; a pattern that takes longer costs the capture, not the service.
REDACT_SECONDS = 0.5
MOST_RULES = 32


class RedactionFailed(SpoError):
    """A completion that cannot be redacted is not captured."""


class RedactionRule(BaseModel):
    """What a regular expression matches becomes the replacement, taken literally."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str = Field(min_length=1, max_length=500)
    replacement: str = Field(default="[redacted]", max_length=100)


def hooks() -> Mapping[str, Callable[[], Callable[[str], str]]]:
    """Installed hooks by name: entry points of the group spo.redaction, each a function from text to text."""
    return {found.name: found.load for found in entry_points(group=ENTRY_POINTS)}


def check_rules(rules: Sequence[RedactionRule], hook: str) -> None:
    """Raises InvalidInput with a pointer to each pattern that is none, and to a hook that is not installed."""
    violations = []
    for index, rule in enumerate(rules):
        try:
            regex.compile(rule.pattern)
        except (regex.error, OverflowError, MemoryError, RecursionError) as error:
            violations.append(FieldViolation(f"/redactions/{index}/pattern", f"no regular expression: {error}"[:500]))
    if hook and hook not in hooks():
        known = ", ".join(sorted(hooks())) or "none"
        violations.append(FieldViolation("/hook", f"no entry point {hook} of {ENTRY_POINTS}; installed: {known}"))
    if violations:
        raise InvalidInput("the capture policy is not valid", code="invalid_request", violations=tuple(violations))


class Redactor:
    """The rules and the hook on one completion, within REDACT_SECONDS in all."""

    def __init__(self, rules: Sequence[RedactionRule], hook: str) -> None:
        self.changed = False
        self._rules = rules
        self._hook = hook
        self._deadline = time.monotonic() + REDACT_SECONDS

    def __call__(self, text: str) -> str:
        """The text as it may be stored. Raises RedactionFailed."""
        found = text
        for rule in self._rules:
            literal = rule.replacement.replace("\\", "\\\\")
            left = self._deadline - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                found = regex.sub(rule.pattern, literal, found, timeout=left, concurrent=True)
            except (TimeoutError, regex.error, MemoryError) as error:
                reason = f"{type(error).__name__} {error}".strip()
                raise RedactionFailed(f"{rule.pattern!r} failed ({reason})", code="redaction_failed") from None
        if self._hook:
            found = self._hooked(found)
        self.changed = self.changed or found != text
        return found

    def _hooked(self, text: str) -> str:
        try:
            return str(hooks()[self._hook]()(text))
        # Whatever a package raises: what could not be redacted is not stored.
        except Exception as error:
            message = f"the hook {self._hook} failed: {type(error).__name__}: {error}"
            raise RedactionFailed(message[:500], code="redaction_failed") from error
