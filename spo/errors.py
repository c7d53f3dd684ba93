"""Every error of the platform.

    SpoError                     code, message, retryable, violations
    |-- InvalidInput             the caller's fault; REST 422, gRPC INVALID_ARGUMENT
    |-- NotFound                 REST 404, gRPC NOT_FOUND
    |-- Conflict                 illegal transition or already there; REST 409, gRPC ABORTED
    |-- PreconditionFailed       REST 412, gRPC FAILED_PRECONDITION
    |   `-- LeaseLost            a fenced caller is no longer the owner
    |-- NotReady                 try again later; REST 503, gRPC UNAVAILABLE, retryable
    |   `-- Unreachable          a service or Redis did not answer in time: names it and its address
    |-- Unauthenticated          a service refused the caller's token; gRPC UNAUTHENTICATED, retryable: tokens change
    |-- ResourceExhausted        too large or too much at once; REST 429, gRPC RESOURCE_EXHAUSTED
    |-- IntegrityError           digest mismatch, malformed file; REST 500, gRPC DATA_LOSS
    `-- InternalError            our fault; REST 500, gRPC INTERNAL

Errors become gRPC statuses only in `spo.rpc`, dead letters only in `spo.messaging.streams`, problem+json only in the
orchestrator.
"""

from __future__ import annotations

from dataclasses import dataclass


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
