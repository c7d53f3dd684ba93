"""A reference that has too little memory: fewer tokens at a time, and what cannot be helped fails by name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import redis

from services.value_estimation import reference as subject
from services.value_estimation.reference import ModelKey, Reference, References
from spo.errors import InvalidInput, NotReady
from spo.messaging.streams.recovery import WORK_DEATHS
from spo.model.logprobs import load_policy, response_logprobs
from spo.model.tokenizer import load_tokenizer

SEQUENCES = [[5, 6, 7], [8, 9, 10], [11, 12, 13], [4, 5, 6]]


@pytest.fixture
def reference(tiny_model_path: Path) -> Reference:
    model = load_policy(tiny_model_path, "float32")
    return Reference(model, load_tokenizer(tiny_model_path), "hash", 4096, threading.Lock())


def test_a_forward_without_memory_is_tried_with_fewer_tokens_and_gives_the_same(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = reference.logprobs(SEQUENCES, SEQUENCES)
    asked: list[int] = []

    def scarce(*positional: object) -> list[list[float]]:
        asked.append(positional[3])  # type: ignore[arg-type]
        if asked[-1] > most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")
        return response_logprobs(*positional)  # type: ignore[arg-type]

    monkeypatch.setattr(subject, "response_logprobs", scarce)
    most = 1100
    assert reference.logprobs(SEQUENCES, SEQUENCES) == usual
    assert asked == [4096, 2048, 1024]

    most = 0
    with pytest.raises(InvalidInput, match="a sequence of 6 tokens does not fit in memory") as refused:
        reference.logprobs(SEQUENCES, SEQUENCES)
    assert refused.value.code == "value_out_of_memory"


def test_a_stored_response_reads_as_its_text_with_or_without_the_name_of_its_end(reference: Reference) -> None:
    end = reference.tokenizer.eos_token
    tokens = reference.encode_response("print(3)")
    for text in ("print(3)", f"print(3){end}"):
        assert reference.reads(tokens, text), text
    for text in ("print(4)", f"print(4){end}", f"print(3){end}4", f"{end}print(3)", ""):
        assert not reference.reads(tokens, text), text


class FailingReferences(References):
    """Cannot load anything."""

    def __init__(self, client: redis.Redis, error: BaseException) -> None:
        super().__init__(client, 1, "cpu", 51)
        self.error = error
        self.loads = 0

    def _read(self, model: ModelKey) -> Reference:
        self.loads += 1
        raise self.error


class Killed(BaseException):
    """The end of the process, as nothing in it sees."""


@pytest.mark.parametrize("error", [MemoryError("8 GB"), Killed()])
def test_a_model_that_kills_by_being_loaded_is_given_up_on_by_name(
    redis_client: redis.Redis, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "OUT_OF_MEMORY_SECONDS", 0)
    key = ModelKey("/models/pi0", "float32", packing=True)
    # One in company, then alone; a restarted process each.
    for _ in range(1 + WORK_DEATHS.alone):
        with pytest.raises(type(error)):
            FailingReferences(redis_client, error)._load(key)

    after = FailingReferences(redis_client, error)
    with pytest.raises(InvalidInput, match=r"/models/pi0.* on .*:51 is given up on: value-estimation died") as refused:
        after._load(key)

    assert refused.value.code == "kills_value_estimation"
    assert after.loads == 0


def test_an_outage_is_tried_again_for_as_long_as_it_takes(redis_client: redis.Redis) -> None:
    references = FailingReferences(redis_client, OSError(5, "Input/output error"))

    for _ in range(WORK_DEATHS.alone + 3):
        with pytest.raises(NotReady, match="Input/output error"):
            references._load(ModelKey("/models/pi0", "float32", packing=True))

    assert references.loads == WORK_DEATHS.alone + 3
