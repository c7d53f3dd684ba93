"""Who asks, and what they may: scopes by path, tenants by job."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from spo.errors import InvalidInput

Scope = Literal[
    "jobs:read",
    "jobs:write",
    "trajectories:read",
    "weights:push",
    "datasets:write",
    "models:query",
    "models:capture",
    "admin",
]
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
READING = ("GET", "HEAD")

# Path, scope to read, scope to change; the first match counts, and a page needs what its REST counterpart needs.
# Other paths need jobs:read to read and jobs:write to change.
_RULES: tuple[tuple[str, Scope, Scope], ...] = (
    (r"(/v1)?/(keys|audit|dead-letters)(/|$)", "admin", "admin"),
    (r"/v1/scale(/|$)", "jobs:read", "admin"),
    (r"/v1/continual(/|$)", "jobs:read", "weights:push"),
    (r"/v1/(chat/completions|completions|models|feedback)(/|$)", "models:query", "models:query"),
    (r"/v1/capture(/|$)", "trajectories:read", "datasets:write"),
    (r"/v1/served-models(/|$)", "jobs:read", "weights:push"),
    (r"/v1/jobs/[^/]+/weights(/|$)", "jobs:read", "weights:push"),
    (r"(/v1)?/jobs/[^/]+/(trajectories|prompts|dead-letters)(/|$)", "trajectories:read", "jobs:write"),
    (r"(/v1)?/experience(/|$)", "trajectories:read", "datasets:write"),
    (r"/v1/datasets(/|$)", "jobs:read", "datasets:write"),
    (r"/v1/platform(/|$)", "jobs:read", "admin"),
)


@dataclass(frozen=True)
class Principal:
    """One key or person. `tenant` owns the jobs it submits and sees no others; an admin sees all."""

    name: str
    tenant: str = ""
    scopes: frozenset[Scope] = field(default_factory=frozenset)
    max_active_jobs: int | None = None

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes

    @property
    def sees_tenant(self) -> str | None:
        """The only tenant whose jobs it may see; None: every tenant's."""
        return None if self.is_admin else self.tenant

    def may(self, scope: Scope) -> bool:
        """Whether it has the scope; an admin has all."""
        return self.is_admin or scope in self.scopes

    def check(self, method: str, path: str) -> None:
        """Raises InvalidInput (code "forbidden", HTTP 403) naming the scope that is missing."""
        needed = needed_scope(method, path)
        if not self.may(needed):
            raise InvalidInput(f"this key lacks the scope {needed}", code="forbidden")


# Who has the configured key, and everybody on loopback where none is configured.
OPERATOR = Principal("operator", scopes=SCOPES)


def needed_scope(method: str, path: str) -> Scope:
    """The scope that a request needs."""
    for pattern, to_read, to_change in _RULES:
        if re.match(pattern, path):
            return to_read if method in READING else to_change
    return "jobs:read" if method in READING else "jobs:write"
