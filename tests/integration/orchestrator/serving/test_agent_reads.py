"""What is read and kept of many sessions and of long ones: pages of a list, paths of more calls than are read at once,
the replica that had them before, and what a thousand sessions hold.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from services.orchestrator import agents, redis_keys as own_keys
from services.orchestrator.agents import AgentSession, CallNode, Continuation, SessionFull, SessionTree
from services.orchestrator.commit import now_ms
from services.orchestrator.http import agents as http_agents
from spo.testing.peers import ServiceDoubles, wait_until
from spo.v1.inference_service_pb2 import ServeRequest
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from tests.integration.orchestrator.serving.conftest import Counter
from tests.integration.orchestrator.serving.test_agent_sessions import Agent

ABOVE = 4
CALLS = 2 * ABOVE + 3


def opened(counter: Counter, deadline_seconds: int) -> AgentSession:
    made = now_ms()
    session, _ = counter.context.agent_sessions.open(
        AgentSession("", counter.job_id, "", "", "", made + 1000 * deadline_seconds, made)
    )
    return session


def asked(counter: Counter, **query: object) -> dict[str, Any]:
    document: dict[str, Any] = counter.ask("GET", "/v1/agents/sessions", params={"job": counter.job_id, **query}).json()
    return document


def test_a_list_of_sessions_comes_in_parts_without_gaps_or_repeats_while_others_open(counter: Counter) -> None:
    sessions = [opened(counter, 600 + number).id for number in range(5)]
    first = asked(counter, limit=2)
    # It ends after all of them, so it would be first.
    later = opened(counter, 900).id
    second = asked(counter, limit=2, cursor=first["next_cursor"])
    last = asked(counter, limit=2, cursor=second["next_cursor"])
    parts = [[each["id"] for each in part["items"]] for part in (first, second, last)]
    assert parts == [sessions[:2:-1], sessions[2:0:-1], sessions[:1]]
    assert last["next_cursor"] is None
    assert asked(counter, limit=1)["items"][0]["id"] == later
    gone = "ses_" + "0" * 26
    assert asked(counter, cursor=gone)["items"] == []
    assert counter.ask("GET", f"/v1/agents/sessions?job={counter.job_id}&cursor=0").status_code == 422


def said(tree: SessionTree, history: list[dict[str, object]]) -> tuple[Continuation, CallNode]:
    """A call that goes on from all of the history, as a session's own is found and stored."""
    found = tree.find(history, [])
    number = 0 if found.number is None else found.number + 1
    node = CallNode(
        0, found.number, found.state, tuple(history[found.turns :]), f"answer {number}", (), "stop", 1, 1,
        len(found.token_ids) + 2, len(found.token_ids), "double", "", now_ms(),
        read=(2 * number, 7), sampled=(2 * number + 1,), logprobs=(-0.5,),
    )  # fmt: skip
    return found, tree.append(node, str(number), found.above)


@pytest.mark.parametrize("echoed", ["{}", " {}\n"])
def test_a_path_of_more_calls_than_are_read_at_once_has_all_their_tokens_in_order(
    counter: Counter, echoed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "MOST_ABOVE", ABOVE)
    tree = counter.context.agent_sessions.tree(opened(counter, 600))
    history: list[dict[str, object]] = []
    for number in range(CALLS):
        history.append({"role": "user", "content": f"question {number}"})
        found, node = said(tree, history)
        assert (found.number, node.number) == (number - 1 if number else None, number)
        assert found.token_ids == tuple(each for n in range(number) for each in (2 * n, 7, 2 * n + 1))
        assert found.begins == (2 if number else 0)
        history.append({"role": "assistant", "content": echoed.format(node.text)})
    assert [node.number for node in tree.path(tree.node(CALLS - 1))] == list(range(CALLS))
    assert [node.sampled for node in tree.nodes()] == [(2 * number + 1,) for number in range(CALLS)]
    # A branch from the middle has the tokens up to there, and is told to be one.
    branch = tree.find([*history[:14], {"role": "user", "content": "another"}], [])
    assert (branch.number, branch.is_leaf, len(branch.token_ids)) == (6, False, 21)


def test_calls_that_an_older_release_stored_are_gone_on_from(counter: Counter) -> None:
    tree = counter.context.agent_sessions.tree(opened(counter, 600))
    history: list[dict[str, object]] = []
    for number in range(4):
        history.append({"role": "user", "content": f"question {number}"})
        found, node = said(tree, history)
        assert len(found.token_ids) == 3 * number
        history.append({"role": "assistant", "content": node.text})
        if number < 3:
            counter.context.redis.hdel(own_keys.agent_nodes(tree.session.id), f"{number}:above")
    assert found.token_ids == (0, 7, 1, 2, 7, 3, 4, 7, 5)
    assert json.loads(counter.context.redis.hget(own_keys.agent_nodes(tree.session.id), "3"))["parent"] == 2


def test_a_call_that_a_full_session_cannot_hold_leaves_nothing_of_it(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = counter.context.agent_sessions
    session = opened(counter, 600)
    tree = sessions.tree(session)
    said(tree, [{"role": "user", "content": "question"}])
    before = sessions.counts(session)
    monkeypatch.setattr(agents, "MOST_BYTES", int(before["bytes"]) + 100)

    with pytest.raises(SessionFull):
        said(tree, [{"role": "user", "content": "another"}])

    assert sessions.counts(session) == before
    assert [node.number for node in tree.nodes()] == [0]
    monkeypatch.undo()
    assert said(tree, [{"role": "user", "content": "another"}])[1].number == 1


def test_calls_of_a_session_go_to_the_replica_that_had_those_before_while_it_is_not_crowded(counter: Counter) -> None:
    with ExitStack() as stack:
        replicas = [counter.peers, *(stack.enter_context(ServiceDoubles()) for _ in range(2))]
        leaving: list[int] = []
        stack.enter_context(beating(counter, replicas, leaving))
        homes = {served_by(replicas, Agent(counter)) for _ in range(6)}
        assert len(homes) > 1, "sessions are spread over the replicas"

        agent = Agent(counter)
        home = served_by(replicas, agent)
        held = threading.Event()
        for replica in replicas:
            replica.inference.goes_on = held
        with ThreadPoolExecutor(8) as threads:
            asked = []
            for number in range(8):
                asked.append(threads.submit(agent.call, {"role": "user", "content": f"{number}"}))
                wait_until(lambda number=number: sum(serving(replicas)) == number + 1, "a call is under way", 300)
            # No other has as many, and none has all of them.
            assert serving(replicas)[home] == max(serving(replicas)) < 8
            held.set()
            assert [each.result().status_code for each in asked] == [200] * 8

        leaving.append(home)
        wait_until(lambda: len(counter.context.serving_pool._live()) == 2, "it is known to leave")
        assert served_by(replicas, agent) != home


@contextmanager
def beating(counter: Counter, replicas: list[ServiceDoubles], leaving: list[int]) -> Iterator[None]:
    """All replicas serve the job, however long that takes."""
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            for number, replica in enumerate(replicas):
                counter.context.replicas.beat(
                    HeartbeatRequest(
                        replica_id=f"inference-{number + 1}",
                        pool="inference",
                        address=replica.address,
                        run_id=counter.job_id,
                        draining=number in leaving,
                    )
                )
            over.wait(0.5)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        wait_until(lambda: len(counter.context.serving_pool._live()) == len(replicas), "all replicas are known")
        yield
    finally:
        over.set()
        thread.join(60)


def served_by(replicas: list[ServiceDoubles], agent: Agent) -> int:
    """The one replica that had all of some calls."""
    for replica in replicas:
        replica.inference.asked = ServeRequest()
    history: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for _ in range(3):
        history += [agent.says(*history), {"role": "user", "content": "more"}]
    (found,) = [number for number, each in enumerate(replicas) if each.inference.asked.run_id]
    return found


def serving(replicas: list[ServiceDoubles]) -> list[int]:
    return [replica.inference.serving for replica in replicas]


def test_of_a_thousand_open_sessions_nothing_is_held_in_the_process_and_little_in_redis(counter: Counter) -> None:
    agent = Agent(counter)
    agent.says({"role": "user", "content": "x"})
    stored = int(counter.context.redis.info("memory")["used_memory"])
    before = alive()
    for _ in range(1000):
        opened(counter, 600)
    tree = counter.context.agent_sessions.tree(counter.context.agent_sessions.get(agent.grant["id"]))
    for _ in range(50):
        said(tree, [{"role": "user", "content": "x"}])
    del tree
    assert alive() == before
    assert (int(counter.context.redis.info("memory")["used_memory"]) - stored) / 1000 < 8192
    assert not http_agents._AT_ONCE
    assert not counter.context.serving_pool._asked


def alive() -> int:
    """Sessions and calls that are objects of this process."""
    gc.collect()
    # By their type: `isinstance` asks objects of other packages for their class, and one of torch's warns of it.
    return sum(issubclass(type(each), AgentSession | CallNode) for each in gc.get_objects())
