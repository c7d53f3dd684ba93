"""Operations: each once, in order, tenants in turn, and nobody's result to anybody else."""

from __future__ import annotations

import pytest

from services.tinker.sessions import Operation, Operations
from spo.errors import InvalidInput, NotReady, ResourceExhausted
from spo.v1 import tinker_service_pb2 as wire


def request(tenant: str, number: int) -> wire.SubmitTinkerRequest:
    return wire.SubmitTinkerRequest(tenant=tenant, optim_step=wire.StepTinkerOptimizer(seq_id=number))


def never(first: Operation, other: Operation) -> bool:
    return False


def operations(most: int = 100, life: float = 60.0, results: float = 60.0) -> Operations:
    return Operations(most, life, results)


def taken(queue: Operations) -> str:
    (operation,) = queue.take(0, never, 1)
    return operation.request_id


def test_a_request_that_is_sent_again_is_done_once() -> None:
    queue = operations()
    for _ in range(3):
        queue.submit("a:1", "a", request("t", 1))
    assert taken(queue) == "a:1"
    assert queue.take(0, never, 1) == []


def test_another_request_under_a_known_id_is_refused_even_when_the_first_is_done() -> None:
    queue = operations()
    queue.submit("a:1", "a", request("t", 1))
    (operation,) = queue.take(0, never, 1)
    queue.end(operation, wire.TinkerResult())
    queue.submit("a:1", "a", request("t", 1))
    with pytest.raises(InvalidInput, match="was another request"):
        queue.submit("a:1", "a", request("t", 2))


def test_tenants_take_turns_and_each_lane_keeps_its_order() -> None:
    queue = operations()
    for number in range(3):
        queue.submit(f"a:{number}", "a", request("greedy", number))
        queue.submit(f"b:{number}", "b", request("greedy", number))
    queue.submit("c:0", "c", request("modest", 0))
    order = [taken(queue) for _ in range(7)]
    assert order.index("c:0") == 1
    assert [each for each in order if each.startswith("a")] == ["a:0", "a:1", "a:2"]
    assert [each[0] for each in order if each[0] != "c"] == ["a", "b", "a", "b", "a", "b"]


def test_those_that_fit_together_are_taken_together() -> None:
    queue = operations()
    for number in range(5):
        queue.submit(f"a:{number}", "a", request("t", number))
    assert len(queue.take(0, lambda first, other: True, 3)) == 3
    assert len(queue.take(0, lambda first, other: True, 3)) == 2


def test_a_tenant_that_collects_nothing_is_held_back_and_no_other() -> None:
    queue = operations(most=2)
    for number in range(2):
        queue.submit(f"a:{number}", "a", request("t", number))
    with pytest.raises(ResourceExhausted):
        queue.submit("a:2", "a", request("t", 2))
    queue.submit("b:0", "b", request("u", 0))
    (operation,) = queue.take(0, never, 1)
    queue.end(operation, wire.TinkerResult())
    queue.submit("a:2", "a", request("t", 2))


def test_a_result_is_its_tenants_alone() -> None:
    queue = operations()
    queue.submit("a:1", "a", request("mine", 1))
    assert list(queue.collect("mine", iter(["a:1"]))) == []
    (operation,) = queue.take(0, never, 1)
    queue.end(operation, wire.TinkerResult(made=wire.TinkerMade(model_id="m")))
    (found,) = queue.collect("mine", iter(["a:1"]))
    assert (found.request_id, found.made.model_id) == ("a:1", "m")
    (other,) = queue.collect("theirs", iter(["a:1"]))
    assert other.unknown


def test_old_results_are_forgotten_and_late_operations_know_it() -> None:
    queue = operations(life=-1.0, results=-1.0)
    queue.submit("a:1", "a", request("t", 1))
    (operation,) = queue.take(0, never, 1)
    with pytest.raises(NotReady, match="too long"):
        operation.check()
    queue.end(operation, wire.TinkerResult())
    queue.submit("a:2", "a", request("t", 2))
    (found,) = queue.collect("t", iter(["a:1"]))
    assert found.unknown
