"""A job whose episodes anybody's script plays: `spo agents run` starts it, and what it was answered is trained on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.reproduce.plan import merged
from tests.e2e.conftest import SHORT, demo_spec
from tests.e2e.live.test_verifiers import QUICK

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(200), pytest.mark.timeout(900)]

# It knows the package and the variables that the package reads, and nothing of the platform.
SCRIPT = """
import openai

client = openai.OpenAI(max_retries=5)
said = [{"role": "user", "content": open("statement.txt").read()}]
for turn in range(2):
    answer = client.chat.completions.create(model="gpt-5", messages=said, max_tokens=10)
    said += [answer.choices[0].message.model_dump(), {"role": "user", "content": "1"}]
print(answer.choices[0].message.content)
"""
SCORE = "print(float('p' in open('answer.txt').read()))"
PLAYED: dict[str, Any] = {
    "tasks": {
        "train_problems": 6,
        "evaluation_problems": 0,
        "harness": {"name": "script", "max_calls": 4, "max_seconds": 120, "reward": "runner", "runner_pool": "e2e"},
    },
    "algorithm": {"losses": [{"objective": "group_centred_squared"}], "value_noise": None},
    "rollout": {"samples_per_prompt": 4, "temperature": 1.0, "top_p": 1.0},
    "offline": {"human_solutions": False, "keep_reference_samples": False},
    "replay": {"mix": [{"source": "online", "share": 1.0}], "unit": "group", "min_online": 8},
    "trainer": {"batch_size": 8, "steps": 2},
}


@contextmanager
def runner(url: str, folder: Path) -> Iterator[None]:
    """`spo agents run` as a person starts it, ended by SIGTERM."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "score.py").write_text(SCORE)
    commands = [f"script={sys.executable} {folder / 'script.py'}", f"{sys.executable} {folder / 'score.py'}"]
    command = [sys.executable, "-m", "spo.cli", "agents", "run", "--harness", commands[0], "--score", commands[1]]
    with (folder / "runner.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--pool", "e2e", "--most", "2"], env=os.environ | {"SPO_API_URL": url}, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "runner.log").read_text()


def test_a_script_with_the_openai_package_plays_a_job_and_is_trained_token_for_token(
    live: Any, client: Client, tmp_path: Path, reference_model: Path
) -> None:
    spec = {**demo_spec(reference_model, merged(SHORT, QUICK), PLAYED), "value": None, "name": "played"}
    job = client.submit(spec)

    with runner(live.url, tmp_path):
        ended = client.wait(job.id, 600)

    assert (ended.state, ended.failure) == ("succeeded", None), (tmp_path / "runner.log").read_text()[-3000:]
    kept = client.trajectories(job.id, limit=50)
    assert len(kept) >= 8
    # Whole groups, each sample once; those that were being played when the last step was done are nobody's any more.
    assert set(Counter(each.group_id for each in kept).values()) == {4}
    assert len({each.trajectory_id for each in kept}) == len(kept)
    for each in kept[:4]:
        whole = client.trajectory(job.id, each.trajectory_id)
        assert [segment.kind for segment in whole.segments] == ["action", "observation", "action"]
        # What the script said is read and not trained on: it has no log-prob of the sampler's.
        assert len(whole.sampling_logprobs) == len(whole.response_token_ids)
        assert 0 < sum(logprob != 0 for logprob in whole.sampling_logprobs) < len(whole.response_token_ids)
