"""The one mapping between SpoErrors and gRPC statuses with details."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from spo import errors
from spo.v1 import errors_pb2

_CODES: tuple[tuple[type[errors.SpoError], int], ...] = (
    (errors.InvalidInput, code_pb2.INVALID_ARGUMENT),
    (errors.NotFound, code_pb2.NOT_FOUND),
    (errors.Conflict, code_pb2.ABORTED),
    (errors.PreconditionFailed, code_pb2.FAILED_PRECONDITION),
    (errors.NotReady, code_pb2.UNAVAILABLE),
    (errors.Unauthenticated, code_pb2.UNAUTHENTICATED),
    (errors.ResourceExhausted, code_pb2.RESOURCE_EXHAUSTED),
    (errors.IntegrityError, code_pb2.DATA_LOSS),
    (errors.SpoError, code_pb2.INTERNAL),
)
_BY_CODE: dict[str, type[errors.SpoError]] = {"lease_lost": errors.LeaseLost}
_BY_STATUS: dict[grpc.StatusCode, type[errors.SpoError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInput,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: errors.PreconditionFailed,
    grpc.StatusCode.UNAVAILABLE: errors.NotReady,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unreachable,
    grpc.StatusCode.CANCELLED: errors.Unreachable,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.DATA_LOSS: errors.IntegrityError,
}


def status_of(error: errors.SpoError) -> Any:
    """The gRPC status, with an ErrorDetail, that says the same as the error."""
    code = next(number for kind, number in _CODES if isinstance(error, kind))
    detail = errors_pb2.ErrorDetail(
        code=error.code,
        retryable=error.retryable,
        violations=[
            errors_pb2.FieldViolation(pointer=violation.pointer, message=violation.message)
            for violation in error.violations
        ],
    )
    packed = AnyMessage()
    packed.Pack(detail)
    return rpc_status.to_status(status_pb2.Status(code=code, message=error.message, details=[packed]))


def error_of(failure: grpc.RpcError, service: str, address: str) -> errors.SpoError:
    """The SpoError a failed call stands for; names the service and where it was looked for when it did not answer."""
    status = failure.code()
    rich = rpc_status.from_call(failure)
    if rich is not None:
        for packed in rich.details:
            detail = errors_pb2.ErrorDetail()
            if packed.Unpack(detail):
                kind = _BY_CODE.get(detail.code) or _BY_STATUS.get(status, errors.InternalError)
                violations = tuple(
                    errors.FieldViolation(violation.pointer, violation.message) for violation in detail.violations
                )
                return kind(rich.message, code=detail.code, violations=violations)
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return errors.Unreachable(f"{service} at {address} did not answer: {failure.details()}")
    return _BY_STATUS.get(status, errors.InternalError)(f"{service} at {address}: {failure.details()}")
