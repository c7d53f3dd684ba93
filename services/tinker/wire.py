"""Tensors as Tinker's clients send and read them: bytes to checked numpy arrays, and back.

L: position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spo.errors import FieldViolation, InvalidInput
from spo.v1 import tinker_service_pb2 as wire

_DTYPES: Mapping[int, np.dtype[np.generic]] = {
    wire.TINKER_DTYPE_FLOAT32: np.dtype("<f4"),
    wire.TINKER_DTYPE_INT64: np.dtype("<i8"),
    wire.TINKER_DTYPE_INT32: np.dtype("<i4"),
}
TARGETS = "target_tokens"


@dataclass(frozen=True)
class Datum:
    """One sequence: what the model reads, what it is asked for at each position, and what the loss needs beside."""

    tokens_L: NDArray[np.int64]
    targets_L: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]


def read_datum(sent: wire.TinkerDatum, at: int, wanted: Sequence[str], vocabulary: int, longest: int) -> Datum:
    """The datum at this place of a request; wanted: the inputs of its loss. Raises InvalidInput with a pointer."""
    tokens_L = np.concatenate([np.zeros(0, np.int64), *(_tokens(chunk, at) for chunk in sent.model_input)])
    if not 1 <= len(tokens_L) <= longest:
        raise _fault(at, "model_input", f"it has {len(tokens_L)} tokens; 1 to {longest} are taken")
    missing = [name for name in (TARGETS, *wanted) if name not in sent.loss_fn_inputs]
    if missing:
        raise _fault(at, f"loss_fn_inputs/{missing[0]}", "the loss needs it")
    targets_L = _tensor(sent.loss_fn_inputs[TARGETS], at, TARGETS, len(tokens_L)).astype(np.int64)
    for name, ids_L in (("model_input", tokens_L), (f"loss_fn_inputs/{TARGETS}", targets_L)):
        if ids_L.min() < 0 or ids_L.max() >= vocabulary:
            raise _fault(at, name, f"a token id is outside the vocabulary of {vocabulary}")
    inputs = {name: _tensor(sent.loss_fn_inputs[name], at, name, len(tokens_L)).astype(np.float32) for name in wanted}
    for name, values_L in inputs.items():
        if not np.isfinite(values_L).all():
            raise _fault(at, f"loss_fn_inputs/{name}", "a number is not finite")
    return Datum(tokens_L, targets_L, inputs)


def array_records(name: str, arrays: Sequence[NDArray[np.float32]]) -> wire.TinkerArrayRecord:
    """One array per datum under one name."""
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
    batched = wire.TinkerBatchedTensor(
        data=b"".join(array.astype("<f4").tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=wire.TINKER_DTYPE_FLOAT32,
    )
    return wire.TinkerArrayRecord(type_tag="ArrayRecord", fields={name: batched}, num_datums=len(arrays))


def floats(values: Iterable[float]) -> bytes:
    """float32, little-endian."""
    return np.fromiter(values, dtype="<f4").tobytes()


def ids(values: Iterable[int]) -> bytes:
    """int32, little-endian."""
    return np.fromiter(values, dtype="<i4").tobytes()


def _tokens(chunk: wire.TinkerChunk, at: int) -> NDArray[np.int64]:
    if chunk.WhichOneof("chunk") != "encoded_text":
        raise _fault(at, "model_input", "only tokens of text are taken")
    return _numbers(chunk.encoded_text.tokens, np.dtype("<i4"), at, "model_input").astype(np.int64)


def _tensor(sent: wire.TinkerTensor, at: int, name: str, length: int) -> NDArray[np.generic]:
    pointer = f"loss_fn_inputs/{name}"
    if sent.sparse_csr or len(sent.shape) > 1:
        raise _fault(at, pointer, "only plain vectors are taken, one number per position")
    if sent.dtype not in _DTYPES:
        raise _fault(at, pointer, "float32, int64 and int32 are taken")
    values = _numbers(sent.dense, _DTYPES[sent.dtype], at, pointer)
    if len(values) != length:
        raise _fault(at, pointer, f"it has {len(values)} numbers for {length} tokens")
    return values


def _numbers(raw: bytes, dtype: np.dtype[np.generic], at: int, pointer: str) -> NDArray[np.generic]:
    if len(raw) % dtype.itemsize:
        raise _fault(at, pointer, f"{len(raw)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(raw, dtype)


def _fault(at: int, pointer: str, message: str) -> InvalidInput:
    violation = FieldViolation(f"/data/{at}/{pointer}", message)
    return InvalidInput(f"data {at}, {pointer}: {message}", code="tinker_datum", violations=(violation,))
