"""Jobs whose episodes a program plays that a runner starts, and what must hold of what they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.agents import AgentSession, AgentSessions, CallNode
from services.orchestrator.jobs import JobStore
from spo.errors import NotFound
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import connect
from spo.testing.peers import trajectories_of
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, SEGMENT_KIND_BRANCH, Trajectory
from tests.chaos.invariants import JobOutcome
from tests.chaos.platform import HARNESS, ChaosPlatform

# Three calls, of which the last has forgotten the others; what is refused for now is asked for again, as the packages
# of OpenAI and Anthropic do.
AGENT = """
import json, os, time, urllib.error, urllib.request

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
FINAL = (400, 401, 403, 404, 409, 422)

def ask(*said):
    body, tries, until = json.dumps({"model": "x", "messages": said, "max_tokens": 10}).encode(), 0, time.time() + 400
    while True:
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        headers["x-stainless-retry-count"] = str(tries)
        try:
            with urllib.request.urlopen(urllib.request.Request(URL, body, headers), timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]
        except (OSError, ValueError) as error:
            if getattr(error, "code", 0) in FINAL or time.time() > until:
                raise
        tries += 1
        time.sleep(0.5)

question = {"role": "user", "content": open("statement.txt").read()}
first = ask(question)
second = ask(question, first, {"role": "user", "content": "1"})
print(ask({"role": "user", "content": "2"})["content"], second["content"])
"""
SCORE = "print(float('p' in open('answer.txt').read()))"
PLAYED: dict[str, Any] = {
    "model": {"max_prompt_tokens": 48},
    "tasks": {
        "train_problems": 16,
        "evaluation_problems": 0,
        "harness": {
            **{"name": HARNESS, "max_calls": 20, "max_seconds": 600, "reward": "runner", "runner_pool": "chaos"},
            "max_episode_tokens": 160,
        },
    },
    "algorithm": {"losses": [{"objective": "group_centred_squared"}], "value_noise": None},
    "rollout": {"samples_per_prompt": 4, "temperature": 1.0, "top_p": 1.0},
    "offline": {"human_solutions": False, "keep_reference_samples": False},
    "replay": {
        "mix": [{"source": "online", "share": 1.0}],
        "unit": "group",
        "min_online": 8,
        "error_buffer": 16,
        "online_capacity": 64,
    },
    "trainer": {"steps": 24, "batch_size": 8, "micro_batch_size": 8, "update_interval": 3, "checkpoint_interval": 6},
}
SCORED = ("finished", "cut")


def check_episodes(platform: ChaosPlatform, outcome: JobOutcome) -> Iterator[str]:
    """What must hold of each trajectory: a session of its own that its runner ended with this reward, and of every
    action the very tokens of one of its calls, after the very tokens that this call had read.
    """
    job_id = outcome.job_id
    with connect(platform.redis_url) as redis:
        sessions = AgentSessions(JobStore(redis))
        known: dict[int, AgentSession] = {}
        for raw in redis.zrange(own_keys.agent_sessions(job_id), 0, -1):
            session = sessions.get(raw.decode())
            known[session.seed] = session
        experience = ExperienceStore(str(platform.launcher.state_path / "experience"))
        ledger = [each for each in trajectories_of(redis, job_id, experience) if each.source == SOURCE_ONLINE]
        for seed, count in Counter(each.seed for each in ledger).items():
            if count > 1 or seed not in known:
                yield f"{count} trajectories of the session {known.get(seed)}"
        for trajectory in ledger:
            if trajectory.seed in known:
                yield from _episode_faults(sessions, known[trajectory.seed], trajectory)


def _episode_faults(sessions: AgentSessions, session: AgentSession, trajectory: Trajectory) -> Iterator[str]:
    try:
        tree = sessions.tree(session)
        nodes, ended = tree.nodes(), sessions.outcome(session)
        paths = {node.number: tree.path(node) for node in nodes}
    except NotFound as error:
        yield f"{session.id} is not whole: {error}"
        return
    said = (ended or {}).get("status"), (ended or {}).get("reward")
    if said[0] not in SCORED or said[1] != trajectory.verdict.score:
        yield f"{session.id} was ended with {said} and has the reward {trajectory.verdict.score}"
    sampled = Counter((_before(paths[node.number]), tuple(node.sampled)) for node in nodes)
    trained = Counter(actions_of(trajectory))
    if foreign := trained - sampled:
        yield f"{session.id}: {sum(foreign.values())} actions are no call of it"
    if (_before(paths[nodes[-1].number]), tuple(nodes[-1].sampled)) not in trained:
        yield f"{session.id}: its last call is not trained on"


def _before(path: list[CallNode]) -> tuple[int, ...]:
    """What a call's tokens stand after."""
    *earlier, last = path
    return (*(token for node in earlier for token in (*node.read, *node.sampled)), *last.read)


def actions_of(trajectory: Trajectory) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each action of an episode: the tokens that it stands after in its branch, and its own."""
    at, before = 0, tuple(trajectory.prompt_token_ids)
    for part in trajectory.segments:
        tokens = tuple(trajectory.response_token_ids[at : at + part.tokens])
        at += part.tokens
        if part.kind == SEGMENT_KIND_ACTION:
            yield before, tokens
        before = tokens if part.kind == SEGMENT_KIND_BRANCH else (*before, *tokens)
