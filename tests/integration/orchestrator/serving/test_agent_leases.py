"""Episodes of a job with a harness: leased, played by a program that knows nothing of the platform, and passed on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import now_ms
from services.orchestrator.http.jobs import waits as job_waits
from services.replay_buffer.store import check_judged
from spo import redis_keys
from spo.cli.agents import EpisodeRunner, Running
from spo.client import Client
from spo.client.models import EpisodeLease
from spo.errors import InvalidInput, LeaseLost, PreconditionFailed
from spo.messaging.streams.entries import publish
from spo.model.chat import trained_mask
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.testing.runs import toy_spec
from spo.v1.inference_service_pb2 import ServedToken, ServeRequest
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_UNSPECIFIED
from tests.integration.orchestrator.serving.conftest import KEY, Counter
from tests.integration.orchestrator.serving.test_agent_sessions import written
from tests.integration.orchestrator.serving.test_agent_trees import trained_in

HARNESS: dict[str, Any] = {"name": "guess", "max_calls": 5}
PLAYED: dict[str, Any] = {
    "tasks": {"train_problems": 6, "evaluation_problems": 0, "harness": HARNESS},
    "value": None,
    "algorithm": {"losses": [{"objective": "group_centred_squared"}]},
    "replay": {"mix": [{"source": "online", "share": 1.0}], "unit": "group"},
    "offline": {"human_solutions": False, "keep_reference_samples": False},
    "rollout": {"samples_per_prompt": 2},
}
# Anybody's script: it knows the package and the variables that the package reads.
GUESS = """
import openai, sys
client = openai.OpenAI(max_retries=0)
said = [{"role": "system", "content": "s"}, {"role": "user", "content": open("statement.txt").read()}]
for turn in range(2):
    answer = client.chat.completions.create(model="gpt-5", messages=said)
    said += [answer.choices[0].message.model_dump(), {"role": "user", "content": "higher"}]
print(answer.choices[0].message.content)
sys.exit(int(sys.argv[1]))
"""


class Played:
    """A running job whose problems agents play, with one group of two samples on its way."""

    def __init__(self, counter: Counter, **harness: object) -> None:
        self.counter, self.context = counter, counter.context
        tasks = {**PLAYED["tasks"], "harness": {**HARNESS, **harness}}
        model = {"path": "/models/pi0", "max_prompt_tokens": 64, "max_response_tokens": 256}
        self.job_id = self.context.jobs.submit(toy_spec({**PLAYED, "model": model, "tasks": tasks}))
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
            assert self.context.jobs.transition(self.job_id, state, "test")
        beat = HeartbeatRequest(
            replica_id="inference-1", pool="inference", address=counter.peers.address, run_id=self.job_id
        )
        self.context.replicas.beat(beat)
        counter.peers.inference.prompt_of = written
        counter.peers.inference.shown = lambda word: ServedToken(text=word, logprob=-0.5)
        sampling = Sampling(samples=2, temperature_min=0.5, temperature_max=1, top_p=0.9, max_tokens=256, seed=3)
        prompt = Prompt(prompt_id="ab", text="guess", response_format="raw", language="text")
        group = PromptGroup(
            group_id=f"{self.job_id}-0", run_id=self.job_id, prompt=prompt, sampling=sampling, source=SOURCE_ONLINE
        )
        publish(self.context.redis, redis_keys.prompts(self.job_id), [group.SerializeToString()])
        self.look()

    def look(self) -> None:
        self.context.agent_episodes.look_after(self.job_id)

    def lease(self, most: int = 1, pool: str = "default") -> list[dict[str, Any]]:
        body = {"pool": pool, "most": most, "wait_seconds": 0}
        items: list[dict[str, Any]] = self.counter.ask("POST", "/v1/agents/leases", json=body).json()["items"]
        return items

    def end(self, lease: dict[str, Any], **outcome: object) -> httpx.Response:
        body = {"token": lease["session"]["token"], "status": "finished", **outcome}
        return self.counter.ask("POST", f"/v1/agents/leases/{lease['lease_id']}/outcome", json=body)

    def call(self, lease: dict[str, Any], *messages: str, **fields: object) -> httpx.Response:
        return self.say(lease, [{"role": "user", "content": text} for text in messages], **fields)

    def say(self, lease: dict[str, Any], messages: list[dict[str, Any]], **fields: object) -> httpx.Response:
        with httpx.Client(timeout=60, trust_env=False) as client:
            return client.post(
                f"{lease['session']['base_url']}/chat/completions",
                json={"model": "x", "messages": messages, **fields},
                headers={"Authorization": f"Bearer {lease['session']['key']}"},
            )

    def silence(self) -> None:
        """Let the leases run out."""
        groups = self.context.agent_episodes._open[self.job_id].values()
        for group in groups:
            group.episodes[:] = [replace(each, lease_until_unix_ms=now_ms() - 1) for each in group.episodes]
        self.look()

    def rollouts(self) -> list[Trajectory]:
        self.look()
        found = self.context.redis.xrange(redis_keys.rollouts())
        groups = [RolloutGroup.FromString(fields[b"payload"]) for _, fields in found]
        return [each for group in groups for each in group.trajectories]


@pytest.fixture
def counter(open_counter: Callable[..., Counter]) -> Counter:
    # A program takes its time to start, and nothing beats for the double.
    return open_counter(replica_silence_seconds=600)


@pytest.fixture
def played(counter: Counter) -> Played:
    return Played(counter)


def test_a_job_whose_episodes_no_runner_asks_for_says_so_until_one_does(played: Played) -> None:
    def waits() -> list[str]:
        return job_waits(played.context, played.job_id, JobState.RUNNING)

    now = [1_700_000_000.0]
    played.context.monitor.clock = lambda: now[0]
    absent = "2 episodes wait for a runner of the pool default: none has asked; 0 are played"
    assert absent in waits()
    now[0] += 61
    (told,) = [wait for wait in waits() if absent in wait]
    assert told.endswith("ends when: a runner of that pool starts: `spo agents run`)")
    assert not any("at inference" in wait for wait in waits()), "it is agents that have the prompts"

    stranger = played.counter.key("another", "agents:run")
    asked = played.counter.ask("POST", "/v1/agents/leases", stranger, json={"pool": "default", "wait_seconds": 0})
    assert asked.json()["items"] == []
    passed_by = "2 episodes wait for a runner of the pool default: those that ask have no key of the job's tenant"
    assert any(passed_by in wait for wait in waits())

    played.lease()

    assert not any("wait for a runner" in wait for wait in waits())


def test_episodes_of_a_group_are_told_one_seed_and_sampled_by_their_own(played: Played) -> None:
    leases = played.lease(2)

    # What a program draws by it is one game, in which the group's episodes are compared.
    assert [lease["seed"] for lease in leases] == [3, 3]
    sessions = played.context.agent_sessions.of_job(played.job_id, 10)
    assert len({session.seed for session, _ in sessions}) == 2


@pytest.mark.parametrize("score", [None, f"{sys.executable} -c print(0.25)"])
def test_an_unmodified_program_plays_episodes_that_become_rollouts_token_for_token(
    counter: Counter, tmp_path: Path, score: str | None
) -> None:
    played = Played(counter, reward="runner" if score else "verifier")
    (tmp_path / "guess.py").write_text(GUESS)
    with Client(counter.url, KEY) as client:
        runner = EpisodeRunner(client, "default", {"guess": f"{sys.executable} {tmp_path}/guess.py 0"}, score, 2)
        runner.run(threading.Event(), episodes=2)

    rollouts = played.rollouts()
    assert [each.sample_index for each in rollouts] == [0, 1]
    for each in rollouts:
        root, second = counter.ask("GET", f"/v1/agents/sessions/{_session(played, each)}/tree").json()["calls"]
        assert list(each.prompt_token_ids) == root["read"] == [100 + byte for byte in b"<system>s<user>guess"]
        assert list(each.response_token_ids) == [*root["sampled"], *second["read"], *second["sampled"]]
        assert [(part.kind, part.tokens) for part in each.segments] == [(1, 3), (2, len(second["read"])), (1, 3)]
        assert list(each.sampling_logprobs) == [-0.5] * 3 + [0.0] * len(second["read"]) + [-0.5] * 3
        assert sum(part.characters for part in each.segments) == len(each.response_text)
        assert each.response_text.endswith("one two three")
        assert each.verdict.score == (0.25 if score else 0)
        assert (each.verdict.outcome == OUTCOME_UNSPECIFIED) == (score is None)
    assert 0.5 <= rollouts[0].temperature <= 1
    assert rollouts[0].temperature != rollouts[1].temperature
    assert counter.context.redis.xlen(redis_keys.prompts(played.job_id)) == 0
    assert not counter.context.redis.hgetall(own_keys.agent_episodes(played.job_id))


def _session(played: Played, trajectory: Trajectory) -> str:
    sessions = played.context.agent_sessions.of_job(played.job_id, 10)
    return next(each.id for each, _ in sessions if each.seed == trajectory.seed)


def test_what_fails_is_begun_anew_and_lost_at_the_third_time_and_never_a_reward_of_0(
    counter: Counter, tmp_path: Path
) -> None:
    played = Played(counter)
    (tmp_path / "guess.py").write_text(GUESS)
    with Client(counter.url, KEY) as client:
        runner = EpisodeRunner(client, "default", {"guess": f"{sys.executable} {tmp_path}/guess.py 1"}, "echo 1", 1)
        runner.run(threading.Event(), episodes=3)
    (lease,) = played.lease(most=5)
    assert (lease["fence"], lease["session"]["model"]) == (0, "policy")
    played.call(lease, "x")
    assert played.end(lease, reward=1).status_code == 200
    (rollout,) = played.rollouts()
    assert (rollout.sample_index, rollout.attempt, rollout.verdict.outcome) == (1, 0, OUTCOME_ACCEPTED)


def test_a_silent_runners_episode_is_anothers_and_what_it_says_later_counts_for_nothing(played: Played) -> None:
    first, other = played.lease(most=2)
    played.call(first, "x")
    token = {"token": first["session"]["token"]}
    renewed = played.counter.ask("POST", f"/v1/agents/leases/{first['lease_id']}/renew", json=token)
    assert renewed.json()["lease_until_unix_ms"] >= first["lease_until_unix_ms"]
    assert not played.lease()

    played.silence()
    again = played.lease(most=2)
    assert [each["fence"] for each in again] == [1, 1]
    assert {each["lease_id"] for each in again}.isdisjoint({first["lease_id"], other["lease_id"]})
    assert played.end(first, reward=1).status_code == 409
    assert played.call(first, "x").status_code == 401
    assert played.counter.ask("POST", f"/v1/agents/leases/{first['lease_id']}/renew", json=token).status_code == 412
    for lease in again:
        played.call(lease, "y")
        assert played.end(lease, reward=0.5).status_code == 200
        assert played.end(lease, reward=0.5).status_code == 200
        assert played.end(lease, reward=1).status_code == 409
    assert [(each.attempt, each.verdict.score) for each in played.rollouts()] == [(1, 0.5), (1, 0.5)]
    assert len(played.rollouts()) == 2


def test_an_orchestrator_that_ends_between_two_outcomes_loses_neither(
    played: Played, open_context: Callable[..., Any]
) -> None:
    one, two = played.lease(most=2)
    for lease in (one, two):
        played.call(lease, "x")
    assert played.end(one, reward=1).status_code == 200
    # Said to the session, and not yet to the episode.
    session = played.context.agent_sessions.get(two["lease_id"])
    outcome = {"status": "cut", "reward": 0.0, "answer": "", "metrics": {}}
    played.context.agent_sessions.close(session, outcome, "cut")

    played.context = open_context(api_key=KEY)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("services.orchestrator.agent_episodes.RECLAIM_SECONDS", 0.01)
        played.look()
        while not played.context.agent_episodes._open[played.job_id]:
            played.look()
    # From here on what it holds is its own, however slowly its rounds come.
    played.context.agent_episodes._consumers[played.job_id].reclaim_after_seconds = 600
    played.silence()
    assert [(each.verdict.score, each.sample_index) for each in played.rollouts()] == [(1, 0), (0, 1)]


def test_a_runner_holds_its_episode_while_it_is_scored_and_gives_it_back_when_it_ends(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guess.py").write_text(GUESS)
    monkeypatch.setattr("spo.cli.agents.RENEW_SECONDS", 0.1)
    commands, stop = {"guess": f"{sys.executable} {tmp_path}/guess.py 0"}, threading.Event()
    slow = f"{sys.executable} -c 'import time; time.sleep(3); print(1)'"
    with Client(played.counter.url, KEY) as client:
        monkeypatch.setattr("services.orchestrator.agent_episodes._LEASE_MS", 2000)
        scored = EpisodeRunner(client, "default", commands, slow, 1)
        thread = threading.Thread(target=scored.run, args=(threading.Event(), 1))
        thread.start()
        while thread.is_alive():
            played.look()
            thread.join(0.2)
        assert scored.ended == 1, "its lease would have run out"
        endless = EpisodeRunner(client, "default", {"guess": "sleep 600"}, slow, 1)
        thread = threading.Thread(target=endless.run, args=(stop,))
        thread.start()
        (group,) = played.context.agent_episodes._open[played.job_id].values()
        wait_until(lambda: "leased" in [each.state for each in group.episodes], "the other episode is leased")
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    (lease,) = played.lease()
    assert lease["fence"] == 0, "who ends is not at fault"


def test_no_runner_holds_an_episode_for_ever_and_one_whose_session_has_expired_is_played_anew(played: Played) -> None:
    first, other = played.lease(most=2)
    sessions = played.context.agent_sessions
    late = replace(sessions.get(first["lease_id"]), deadline_unix_ms=1)
    with pytest.raises(LeaseLost, match="as long as they may"):
        played.context.agent_episodes.renew(late)
    for lease in (first, other):
        played.call(lease, "x")
        assert played.end(lease, reward=1).status_code == 200
    played.context.redis.delete(own_keys.agent_session(first["lease_id"]))
    assert not played.rollouts()
    (again,) = played.lease(most=5)
    assert again["fence"] == 1
    played.call(again, "x")
    assert played.end(again, reward=1).status_code == 200
    assert sorted(each.attempt for each in played.rollouts()) == [0, 1]


def test_pools_rooms_and_rewards_are_the_jobs(played: Played) -> None:
    assert not played.lease(pool="docker")
    (lease,) = played.lease()
    give_back = f"/v1/agents/leases/{lease['lease_id']}/give-back"
    assert played.counter.ask("POST", give_back, json={"token": lease["session"]["key"]}).status_code == 403
    assert played.counter.ask("POST", give_back, json={"token": lease["session"]["token"]}).status_code == 200
    (lease,) = played.lease()
    assert lease["fence"] == 0
    too_long = played.call(lease, "a" * 100)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert played.end(lease, reward=1).status_code == 422
    played.call(lease, "x", max_tokens=9)
    asked: ServeRequest = played.counter.peers.inference.asked
    assert (asked.path_tokens, asked.max_tokens, asked.top_p) == (64 + 256, 9, pytest.approx(0.9))
    for said, given in ((None, 256), (9999, 256), (256, 256)):
        played.call(lease, "x", max_tokens=said)
        assert played.counter.peers.inference.asked.max_tokens == given
    assert played.end(lease).status_code == 422
    assert played.end(lease, status="cut", reward=0).status_code == 200


@pytest.mark.parametrize(
    ("changed", "pointer"),
    [
        ({"value": {}}, "/value"),
        ({"tasks": {**PLAYED["tasks"], "evaluation_problems": 3}}, "/tasks/evaluation_problems"),
        ({"tasks": {**PLAYED["tasks"], "environment": {"name": "python"}}}, "/tasks/harness"),
        ({"trainer": {**PLAYED.get("trainer", {}), "reference": "sampler"}}, "/trainer/reference"),
        ({"replay": {"mix": [{"source": "online", "share": 0.5}, {"source": "human", "share": 0.5}]}}, "/replay/mix"),
        (
            {"algorithm": {"losses": [{"objective": "ppo"}], "critic": {"learning_rate": 1e-3}}},
            "/algorithm/losses",
        ),
        (
            {"tasks": {**PLAYED["tasks"], "harness": {**HARNESS, "max_episode_tokens": 9}}},
            "/tasks/harness/max_episode_tokens",
        ),
        (
            {"tasks": {**PLAYED["tasks"], "harness": {**HARNESS, "max_episode_tokens": 900_000}}},
            "/trainer/max_tokens_per_micro_batch",
        ),
    ],
)
def test_a_job_that_agents_cannot_play_is_refused(changed: dict[str, Any], pointer: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        toy_spec({**PLAYED, "model": {"path": "/models/pi0"}, **changed})
    assert pointer in [each.pointer for each in refused.value.violations]


def test_a_critic_learns_of_episodes_of_which_one_path_is_trained_on() -> None:
    tasks = {**PLAYED["tasks"], "harness": {**HARNESS, "branches": "main"}}
    algorithm = {"losses": [{"objective": "ppo"}], "critic": {"learning_rate": 1e-3}}
    rollout = {"temperature": 1.0, "top_p": 1.0}
    changed = {"tasks": tasks, "algorithm": algorithm, "rollout": rollout}
    spec = toy_spec({**PLAYED, "model": {"path": "/models/pi0"}, **changed})
    assert spec.tasks.harness is not None
    assert spec.tasks.harness.branches == "main"


def test_an_episode_of_several_branches_is_one_trajectory_that_trains_each_sampled_token_once(
    counter: Counter,
) -> None:
    played = Played(counter, max_calls=9)
    one, two = played.lease(most=2)
    said: list[dict[str, Any]] = [{"role": "user", "content": "guess"}]

    def ask(messages: list[dict[str, Any]], model: str = "policy") -> dict[str, Any]:
        found = played.say(one, messages, model=model)
        assert found.status_code == 200, found.text
        answer: dict[str, Any] = found.json()["choices"][0]["message"]
        return answer

    first = [*said, ask(said), {"role": "user", "content": "higher"}]
    # The program thinks again of what it asks, and goes on from its second answer; it titles its work beside.
    ask(first)
    second = [*first, ask(first), {"role": "user", "content": "lower"}]
    ask(second)
    ask([{"role": "user", "content": "title"}], model="small")
    # It looks back to its first answer, and forgets all at last.
    ask([*first[:2], {"role": "user", "content": "lower"}])
    ask([{"role": "user", "content": "sum up"}])
    assert played.end(one, reward=0.5).status_code == 200
    played.call(two, "x")
    assert played.end(two, reward=1).status_code == 200

    whole, single = played.rollouts()
    calls = counter.ask("GET", f"/v1/agents/sessions/{_session(played, whole)}/tree").json()["calls"]
    assert [call["parent"] for call in calls] == [None, 0, 0, 2, None, 0, None]
    read, sampled = [call["read"] for call in calls], [call["sampled"] for call in calls]
    parts = [(part.kind, part.label) for part in whole.segments]
    main = [(1, ""), (2, ""), (1, ""), (2, ""), (1, "")]
    assert parts == [*main, (3, "after call 0"), (1, ""), (3, "a root of its own"), (1, "")]
    assert list(whole.prompt_token_ids) == read[0]
    begun = [*read[0], *sampled[0]]
    expected = [sampled[0], read[2], sampled[2], read[3], sampled[3], begun, read[5], sampled[5], read[6], sampled[6]]
    assert list(whole.response_token_ids) == [token for part in expected for token in part]
    assert sum(part.characters for part in whole.segments) == len(whole.response_text)
    actions = [part.tokens for part in whole.segments if part.kind == 1]
    assert actions == [len(sampled[number]) for number in (0, 2, 3, 5, 6)], "without what was thrown away, or titles"
    trained = trained_mask(whole)
    assert [logprob != 0 for logprob in whole.sampling_logprobs] == trained.tolist()
    assert (whole.verdict.score, len(single.segments)) == (0.5, 1)
    whole.reward = -0.5
    check_judged(played.job_id, played.context.jobs.spec(played.job_id), whole)


def test_sub_agents_that_call_at_once_are_branches_of_one_episode_and_each_sampled_token_is_trained_once(
    counter: Counter,
) -> None:
    played, double = Played(counter, max_calls=9), counter.peers.inference
    one, two = played.lease(most=2)
    numbers, both = iter(range(100, 10_000)), threading.Barrier(2)
    # Each sampled token is another, and each call of a sub-agent is under way with one of the other.
    double.ids_of = lambda number: [next(numbers)]

    def sampled_for(request: ServeRequest) -> str:
        if "help" in request.messages_json:
            both.wait(60)
        return "one two three"

    double.says = sampled_for

    def plays(said: list[dict[str, Any]], *observed: str) -> list[dict[str, Any]]:
        for text in observed:
            found = played.say(one, said)
            assert found.status_code == 200, found.text
            said = [*said, found.json()["choices"][0]["message"], {"role": "user", "content": text}]
        return said

    said = plays([{"role": "user", "content": "plan"}], "delegated")
    with ThreadPoolExecutor(2) as threads:
        for each in [
            threads.submit(plays, [{"role": "system", "content": f"help {name}"}], "more", "most", "enough")
            for name in "ab"
        ]:
            each.result(60)
    plays(said, "done")
    assert played.end(one, reward=0.5).status_code == 200
    played.call(two, "x")
    assert played.end(two, reward=1).status_code == 200

    whole, _ = played.rollouts()
    calls = counter.ask("GET", f"/v1/agents/sessions/{one['lease_id']}/tree").json()["calls"]
    # Of the plan, of each sub-agent three, and of the plan the end.
    assert len(calls) == 8
    assert [call["parent"] for call in calls].count(None) == 3
    assert (calls[-1]["parent"], calls[-1]["reason"]) == (0, "")
    sub_agent = [1, 2, 1, 2, 1]
    assert [part.kind for part in whole.segments] == [*sub_agent, 3, *sub_agent, 3, 1, 2, 1]
    assert {part.label for part in whole.segments if part.kind == 3} == {"a root of its own"}
    trained = [token for token, own in zip(whole.response_token_ids, trained_mask(whole), strict=True) if own]
    sampled = [token for call in calls for token in call["sampled"]]
    assert len(set(sampled)) == len(sampled) == 8 * 3
    assert sorted(trained) == sorted(sampled), "each once, and nothing else"
    of_call = {call["number"]: call for call in calls}
    for before, own in trained_in(whole):
        (call,) = (each for each in calls if each["sampled"] == own)
        path = [call["read"]]
        while (parent := call["parent"]) is not None:
            call = of_call[parent]
            path = [call["read"], call["sampled"], *path]
        assert before == [token for part in path for token in part]


def test_what_an_episodes_tokens_do_not_hold_is_refused_to_the_agent_and_only_there(counter: Counter) -> None:
    played = Played(counter, max_episode_tokens=300)
    (lease,) = played.lease()
    played.call(lease, "a" * 40)
    asked: ServeRequest = counter.peers.inference.asked
    assert asked.path_tokens == 64 + 256
    # Three tokens were sampled; what goes on has the rest, and what begins anew brings all that it reads.
    played.call(lease, "b")
    assert counter.peers.inference.asked.path_tokens == 300 - 3
    taken = 3 + len("<user>b") + 3
    played.call(lease, "c")
    assert counter.peers.inference.asked.path_tokens == 300 - taken


def test_where_one_path_is_trained_on_others_take_nothing_of_its_tokens(counter: Counter) -> None:
    main = Played(counter, branches="main")
    (lease,) = main.lease()
    main.call(lease, "b")
    main.call(lease, "c")
    assert counter.peers.inference.asked.path_tokens == 64 + 256
    assert main.end(lease, reward=1).status_code == 200


def test_an_episode_that_a_runner_cannot_start_is_anothers_at_once_and_at_no_fault(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(EpisodeRunner):
        def begin(self, command: Sequence[str], folder: Path, lease: EpisodeLease) -> Running:
            raise OSError("no room left")

    monkeypatch.setattr("spo.cli.agents.PAUSE_SECONDS", 0.01)
    with Client(played.counter.url, KEY) as client:
        Broken(client, "default", {"guess": sys.executable}, "echo 1", 1).run(threading.Event(), episodes=2)
    assert [each["fence"] for each in played.lease(most=5)] == [0, 0]


def test_a_command_that_never_calls_stops_its_runner_before_it_has_burnt_the_episodes_attempts(played: Played) -> None:
    with Client(played.counter.url, KEY) as client:
        command = f"{sys.executable} -c 'raise SystemExit(\"no such model file\")'"
        runner = EpisodeRunner(client, "default", {"guess": command}, "echo 1", 1)
        with pytest.raises(PreconditionFailed, match=r"without a call.*no such model file") as stopped:
            runner.run(threading.Event())
    assert stopped.value.code == "harness_is_silent"
    # The last of them counts, so that one problem that no agent can begin stops no runner for ever.
    assert sorted(each["fence"] for each in played.lease(most=5)) == [0, 1]


@pytest.mark.parametrize("command", ["no-such-program", f"{sys.executable} /opt/no/such.py", ""])
def test_a_runner_whose_program_is_not_there_is_refused_before_it_leases(command: str) -> None:
    with Client("http://127.0.0.1:9", KEY) as client, pytest.raises(InvalidInput) as refused:
        EpisodeRunner(client, "default", {"guess": command})
    assert refused.value.code == "no_program"


def test_what_is_played_when_a_runner_is_asked_to_stop_may_end_within_its_patience(
    counter: Counter, tmp_path: Path
) -> None:
    played = Played(counter, reward="verifier")
    (tmp_path / "slow.py").write_text(GUESS.replace("print(", "import time; time.sleep(3); print("))
    stop = threading.Event()
    with Client(played.counter.url, KEY) as client:
        runner = EpisodeRunner(client, "default", {"guess": f"{sys.executable} {tmp_path}/slow.py 0"}, None, 1)
        runner.patience_seconds = 60.0
        thread = threading.Thread(target=runner.run, args=(stop,))
        thread.start()
        (group,) = played.context.agent_episodes._open[played.job_id].values()
        sessions = played.context.agent_sessions

        def called() -> bool:
            held = [sessions.get(each.session_id) for each in group.episodes if each.session_id]
            return any(int(sessions.counts(each)["calls"]) for each in held)

        wait_until(called, "an agent has called its session")
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert sorted(each.state for each in group.episodes) == ["done", "waiting"]


def test_open_episodes_are_counted_by_pool_and_a_pool_that_has_none_any_more_is_there_with_0(played: Played) -> None:
    def counted() -> dict[str, float]:
        lines = played.counter.ask("GET", "/metrics").text.splitlines()
        found = [line.rpartition(" ") for line in lines if line.startswith("spo_agents_open_episodes{")]
        return {name.partition('"')[2].rstrip('"}'): float(value) for name, _, value in found}

    assert counted() == {"default": 2}
    (one,) = played.lease()
    assert not played.lease(pool="other")
    assert counted() == {"default": 2, "other": 0}
    played.call(one, "x")
    assert played.end(one, reward=1).status_code == 200
    assert counted() == {"default": 1, "other": 0}
    (two,) = played.lease()
    played.call(two, "x")
    assert played.end(two, reward=1).status_code == 200
    played.look()
    assert counted() == {"default": 0, "other": 0}


def test_a_group_with_a_lost_episode_is_passed_on_with_those_that_ended(counter: Counter) -> None:
    played = Played(counter)
    for _ in range(3):
        lease = next(each for each in played.lease(most=1))
        assert played.end(lease, status="failed").status_code == 200
    (other,) = played.lease(most=5)
    played.call(other, "x")
    assert played.end(other, reward=0.25).status_code == 200
    (rollout,) = played.rollouts()
    assert (rollout.sample_index, rollout.verdict.score, rollout.group_samples) == (1, 0.25, 1)
    assert not played.lease(most=5)
