"""What is read of many sessions and of long ones: pages of a list, and paths of more calls than are read at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.orchestrator import agents, redis_keys as own_keys
from services.orchestrator.agents import AgentSession, CallNode, Continuation, SessionTree
from services.orchestrator.commit import now_ms
from tests.integration.orchestrator.serving.conftest import Counter

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
