"""Environments that run programs, in the judge's real sandbox, and conversations that outlive the pool's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from services.inference.engine import Sample
from services.inference.environment_pool import EnvironmentPool
from services.inference.episodes import start_episodes
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler, JudgeService
from services.verifier.environments.service import MOST_STATE_BYTES, EnvironmentService, StateSeal, all_environments
from spo.errors import InternalError, InvalidInput, NotFound, Unreachable
from spo.rpc.client import RpcClient, is_healthy
from spo.rpc.server import RpcServer
from spo.spec.tasks import ConversationSetup
from spo.tasks.toy import toy_tasks
from spo.testing.peers import wait_until
from spo.v1 import environment_service_pb2 as wire
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceStub, add_EnvironmentServiceServicer_to_server
from spo.v1.judge_service_pb2 import UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub, add_JudgeServiceServicer_to_server
from tests.support.conversations import ScriptedEngine, assignment, conversation_group


@pytest.fixture
def judge(redis_client: redis.Redis) -> Iterator[RpcClient]:
    settings = Settings(recheck_rate=0)
    scheduler = JudgeScheduler(redis_client, settings, choose_tier(settings), workers=1)
    server = RpcServer("127.0.0.1", 0)
    add_JudgeServiceServicer_to_server(JudgeService(scheduler), server.server)
    server.start()
    client = RpcClient("sandbox-judge", server.address, JudgeServiceStub)
    yield client
    client.close()
    server.stop(1)
    scheduler.close()


@pytest.fixture
def environments(redis_client: redis.Redis, judge: RpcClient) -> Iterator[RpcClient]:
    server = RpcServer("127.0.0.1", 0)
    service = EnvironmentService(all_environments(judge), StateSeal(redis_client))
    add_EnvironmentServiceServicer_to_server(service, server.server)
    server.start()
    client = RpcClient("verifier", server.address, EnvironmentServiceStub)
    yield client
    client.close()
    server.stop(1)


class Talk:
    """One episode, by hand."""

    def __init__(self, client: RpcClient, name: str, setup: ConversationSetup, seed: int = 0) -> None:
        self.client, self.name, self.setup = client, name, setup
        request = wire.BeginRequest(environment=name, environment_json=setup.to_json(), seeds=[seed])
        (self.last,) = client.call("Begin", request).observations

    def say(self, action: str) -> wire.Observation:
        turn = wire.Turn(state=self.last.state, action=action)
        request = wire.StepRequest(environment=self.name, environment_json=self.setup.to_json(), turns=[turn])
        (self.last,) = self.client.call("Step", request).observations
        return self.last


def test_a_program_is_run_and_its_output_is_what_follows(environments: RpcClient) -> None:
    talk = Talk(environments, "python", ConversationSetup(arguments={"seconds": 1, "output_bytes": 1000}))

    assert talk.say("Let me see:\n```python\nprint(6 * 7)\n```\n").text == "42\n"
    failed = talk.say("```python\nprint('before')\n1 / 0\n```")
    assert failed.text.startswith("before\nexit status 1")
    assert "ZeroDivisionError" in failed.text
    assert "SyntaxError" in talk.say("```python\nprint(\n```").text
    assert talk.say("```python\npass\n```").text == "(no output)"
    assert "cpu time limit" in talk.say("```python\nwhile True: pass\n```").text
    assert talk.say("```python\nprint('x' * 5000)\n```").text == "x" * 1000
    last = talk.say("It is 42.")
    assert (last.done, last.state, last.HasField("verdict")) == (True, b"", False)


def test_an_attempt_is_told_what_fails_in_public_and_nothing_of_the_hidden_tests(
    environments: RpcClient, judge: RpcClient
) -> None:
    problem = toy_tasks(1, 0, seed=0).train[0]
    judge.call("UploadTests", UploadTestsRequest(test_sets=[problem.public_tests]))
    told = {"public_tests_digest": problem.public_tests_digest, "language": "python", "response_format": "raw"}
    setup = ConversationSetup(arguments={"attempts": 3}, problem=told)
    talk = Talk(environments, "retry_with_errors", setup)

    wrong = talk.say("print('no number')")
    assert (wrong.done, wrong.score, wrong.HasField("verdict")) == (False, 0.0, False)
    assert "test 1: token 1: expected" in wrong.text
    assert "SyntaxError" in talk.say("print(").text
    assert talk.say("print(1)").done

    public = {test.stdin.decode(): test.stdout.decode() for test in problem.tests.tests if test.public}
    remembered = f"print({public!r}[input() + chr(10)])"
    # Right in public, wrong on every hidden test: the policy is not told.
    again = Talk(environments, "retry_with_errors", setup)
    assert (again.say(remembered).done, again.last.text, again.last.score) == (True, "", 1.0)
    assert Talk(environments, "retry_with_errors", setup).say(problem.human_solutions[0]).score == 1.0


def test_what_cannot_be_asked_is_refused_with_its_reason(environments: RpcClient, redis_client: redis.Redis) -> None:
    setup = ConversationSetup()
    with pytest.raises(NotFound, match="text_game"):
        Talk(environments, "chess", setup)
    with pytest.raises(InvalidInput, match="no public tests"):
        Talk(environments, "retry_with_errors", setup)
    with pytest.raises(InvalidInput, match="/arguments/guesses"):
        Talk(environments, "text_game", ConversationSetup(arguments={"guesses": 0}))
    with pytest.raises(InvalidInput, match="/arguments/number"):
        Talk(environments, "text_game", ConversationSetup(problem={"arguments": {"number": "4"}}))

    talk = Talk(environments, "text_game", setup, seed=3)
    state = talk.last.state
    assert b'"number":' in state
    forged = state[:32] + state[32:].replace(b'"used":0', b'"used":-9')
    for bad in (forged, b"", state[:-1], state + b" "):
        talk.last.state = bad
        with pytest.raises(InvalidInput) as caught:
            talk.say("1")
        assert caught.value.code == "bad_environment_state"
    # Of another setup it is another episode's.
    talk.last.state, talk.setup = state, ConversationSetup(arguments={"guesses": 100})
    with pytest.raises(InvalidInput):
        talk.say("1")

    seal = StateSeal(redis_client)
    assert StateSeal(redis_client).open("e", seal.seal("e", {"a": 1})) == {"a": 1}
    with pytest.raises(InternalError, match="bytes; at most"):
        seal.seal("e", {"a": "x" * MOST_STATE_BYTES})


def start_pool(redis_url: str, port: int) -> subprocess.Popen[bytes]:
    settings = {"SPO_REDIS_URL": redis_url, "SPO_VERIFIER_PORT": str(port), "SPO_ORCHESTRATOR_ADDRESS": "127.0.0.1:9"}
    process = subprocess.Popen([sys.executable, "-m", "services.verifier"], env=os.environ | settings)
    wait_until(lambda: is_healthy(f"127.0.0.1:{port}"), "the pool serves", 60)
    return process


@pytest.mark.timeout(120)
def test_a_pool_that_is_killed_in_mid_episode_costs_a_retry_and_no_episode(
    redis_server: str, redis_client: redis.Redis, free_port: int
) -> None:
    setup = ConversationSetup(max_turns=12, arguments={"low": 0, "high": 9, "guesses": 10})
    group = conversation_group("text_game", setup, samples=6)
    processes = [start_pool(redis_server, free_port)]

    def guess(request: Any, turn: int) -> Sample:
        if turn == 3 and len(processes) == 1:
            # In the middle of every episode: the next turns find nobody, and then another process.
            processes[0].send_signal(signal.SIGKILL)
            processes[0].wait(10)
            processes.append(start_pool(redis_server, free_port))
        return said(str(turn), request)

    def said(text: str, request: Any) -> Sample:
        tokens = tuple(held.tokenizer.encode(text, add_special_tokens=False))
        return Sample((*tokens, held.tokenizer.eos_token_id), (-1.0,) * (len(tokens) + 1), True, 0, 0)

    engine = ScriptedEngine(guess)
    held = assignment(engine)
    pool = EnvironmentPool(f"127.0.0.1:{free_port}")
    try:
        disturbed = start_episodes(held, pool, group, None, alone=False).result(60).trajectories
        engine.fed.clear()
        undisturbed = start_episodes(held, pool, group, None, alone=False).result(60).trajectories
    finally:
        pool.close()
        for process in processes:
            process.kill()
            process.wait(10)

    assert len(processes) == 2
    assert [list(each.response_token_ids) for each in disturbed] == [
        list(each.response_token_ids) for each in undisturbed
    ]
    # Guesses 0, 1, 2 and so on: all games are won, after as many turns as the number says.
    turns = [sum(segment.kind == 1 for segment in each.segments) for each in disturbed]
    assert [each.verdict.detail for each in disturbed] == [f"guessed with guess {count}" for count in turns]
    assert max(turns) > 4


def test_a_group_ends_where_its_environment_stays_away_or_nobody_wants_it(free_port: int) -> None:
    engine = ScriptedEngine(lambda request, turn: pytest.fail("nothing is sampled"))
    group = conversation_group("text_game", ConversationSetup())
    impatient = EnvironmentPool(f"127.0.0.1:{free_port}", patience_seconds=0.0)
    started = start_episodes(assignment(engine), impatient, group, None, alone=False)
    with pytest.raises(Unreachable):
        started.result(20)
    impatient.close()

    patient = EnvironmentPool(f"127.0.0.1:{free_port}")
    waiting = start_episodes(assignment(engine), patient, group, None, alone=False)
    with pytest.raises(Unreachable, match="did not end"):
        waiting.result(0.2)
    assert waiting.future.cancelled()
    patient.close()
