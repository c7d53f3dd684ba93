"""kill -9 of zygotes and of the judge itself while it works: every group arrives once, nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from services.sandbox_judge.sandbox_worker import memory_parent
from services.sandbox_judge.test_set_store import TestSets
from spo import redis_keys
from spo.messaging.streams.entries import publish
from spo.spec.job_spec import parse_job_spec, spec_to_json
from spo.testing.peers import wait_until
from spo.v1 import verdict_pb2
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory

GROUPS, SAMPLES = 100, 20


def start_judge(redis_server: str, log: Path) -> psutil.Popen:
    environment = {
        **os.environ,
        "SPO_REDIS_URL": redis_server,
        "SPO_SANDBOX_JUDGE_PORT": "0",
        "SPO_SANDBOX_JUDGE_RECLAIM_SECONDS": "3",
        "SPO_ORCHESTRATOR_ADDRESS": "127.0.0.1:1",
    }
    command = [sys.executable, "-m", "services.sandbox_judge"]
    with log.open("ab") as sink:
        return psutil.Popen(command, env=environment, stderr=sink, stdout=sink)


def zygotes_of(judge: psutil.Popen) -> list[psutil.Process]:
    """What the judge starts, and no program: one that is killed from outside ends by a signal, so its verdict says."""
    try:
        return [each for each in judge.children(recursive=True) if leads_a_session(each)]
    except psutil.NoSuchProcess:
        return []


def leads_a_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def group(number: int, digest: str) -> RolloutGroup:
    prompt = Prompt(prompt_id="p", tests_digest=digest, language="python", response_format="raw")
    answers = [f"print(int(input()) * {2 + sample % 2})  # {number} {sample}" for sample in range(SAMPLES)]
    return RolloutGroup(
        request=PromptGroup(group_id=f"g{number}", run_id="job_1", prompt=prompt),
        trajectories=[Trajectory(trajectory_id=f"{number}-{n}", response_text=text) for n, text in enumerate(answers)],
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_verdict_of_two_thousand_arrives_once_whoever_is_killed(
    redis_client: redis.Redis, redis_server: str, tmp_path: Path
) -> None:
    cases = [verdict_pb2.TestCase(stdin=b"%d\n" % n, stdout=b"%d\n" % (2 * n)) for n in range(1, 3)]
    digest = TestSets(redis_client).upload(verdict_pb2.TestSet(tests=cases))
    redis_client.set(redis_keys.run_spec("job_1"), spec_to_json(parse_job_spec({"model": {"path": "pi0"}})))
    publish(redis_client, redis_keys.rollouts(), [group(n, digest).SerializeToString() for n in range(GROUPS)])
    log = tmp_path / "judge.log"
    judge = start_judge(redis_server, log)
    seen: set[psutil.Process] = set()
    kills = 0
    try:
        for restarts in range(3):
            goal = (restarts + 1) * GROUPS // 4
            while redis_client.xlen(redis_keys.verdicts()) < goal:
                victims = zygotes_of(judge)
                seen.update(victims)
                if victims:
                    kill(victims[kills % len(victims)])
                    kills += 1
                assert judge.is_running(), log.read_text()[-2000:]
                time.sleep(1.0)
            seen.update(zygotes_of(judge))
            judge.kill()
            judge.wait(20)
            wait_until(lambda: not any(each.is_running() for each in seen), "the zygotes have ended", 10)
            judge = start_judge(redis_server, log)
        wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) >= GROUPS, "every group is judged", 200)
        wait_until(lambda: redis_client.xlen(redis_keys.rollouts()) == 0, "no group waits", 20)
        judge.terminate()
        assert judge.wait(30) == 0
    finally:
        kill(judge)
    judged = [RolloutGroup.FromString(fields[b"payload"]) for _, fields in redis_client.xrange(redis_keys.verdicts())]
    assert sorted(each.request.group_id for each in judged) == sorted(f"g{n}" for n in range(GROUPS))
    for each in judged:
        assert [trajectory.reward for trajectory in each.trajectories] == [0.0, -1.0] * (SAMPLES // 2)
    assert redis_client.xlen(redis_keys.dead_letters(redis_keys.rollouts())) == 0
    assert kills > 3
    wait_until(lambda: not any(each.is_running() for each in seen), "the zygotes have ended", 10)
    # A judge that was killed leaves empty cgroups to the next, which was asked to stop and leaves none.
    parent = memory_parent("auto")
    assert parent is None or not [each for each in parent.glob("spo-judge-*") if str(judge.pid) in each.name]


def test_a_judge_without_a_sandbox_refuses_to_serve(redis_server: str) -> None:
    environment = {
        **os.environ,
        "SPO_REDIS_URL": redis_server,
        "SPO_SANDBOX_JUDGE_ISOLATION": "seccomp+landlock",
        "SPO_SANDBOX_JUDGE_MINIMUM_ISOLATION": "namespaces+seccomp",
    }
    finished = subprocess.run(
        [sys.executable, "-m", "services.sandbox_judge"], env=environment, capture_output=True, text=True, timeout=60
    )

    assert finished.returncode == 1
    assert "no_isolation" in finished.stderr
    assert "below the required namespaces+seccomp" in finished.stderr
