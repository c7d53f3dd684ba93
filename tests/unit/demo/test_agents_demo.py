"""The agents' demo: its job is one that the platform takes, and its players are who they are said to be."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.verifier.environments.service import Setup, TextGame
from spo.demo.agents import AgentsRun, job_document, together, wilson
from spo.demo.guess import ASKED, LOWER, is_right, play
from spo.demo.guess_model import build_guess_model, build_tokenizer, game
from spo.spec.job_spec import parse_job_spec
from spo.tasks.records import read_jsonl
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED


def test_the_job_is_one_that_agents_play(tmp_path: Path) -> None:
    spec = parse_job_spec(job_document(tmp_path, AgentsRun(seed=3)))
    assert spec.tasks.harness is not None
    assert (spec.tasks.harness.name, spec.seed) == ("guess", 3)
    rows = (tmp_path / "games.jsonl").read_text().splitlines()
    assert len(set(rows)) == 64


def test_the_same_job_is_played_by_an_environment_whose_words_are_the_programs(tmp_path: Path) -> None:
    spec = parse_job_spec(job_document(tmp_path, AgentsRun(seed=3, played_by="environment")))
    assert spec.tasks.harness is None
    assert spec.tasks.environment is not None
    (problem,) = read_jsonl(tmp_path / "games.jsonl")
    assert problem.statement == ASKED
    game, setup = TextGame(), Setup(spec.tasks.environment.arguments)
    assert game.begin(setup, 0).text == "", "the statement is all that is shown before the first guess"
    for number, guesses in itertools.product(range(1, 9), itertools.product(["1", "4", "8", "x"], repeat=3)):
        heard, won = by_program(number, guesses)
        state: dict[str, Any] = {"number": number, "used": 0}
        for guess, answer in zip(guesses, [*heard, None], strict=False):
            reply = game.step(setup, state, guess)
            state = reply.state
            assert (reply.done, reply.text) == (answer is None, answer or "")
        assert reply.verdict is not None
        assert (reply.verdict.outcome == OUTCOME_ACCEPTED) is won


def by_program(number: int, guesses: Sequence[str]) -> tuple[list[str], bool]:
    """What the program tells a policy that guesses so, and whether it has won then."""
    heard: list[list[str]] = []

    def create(messages: list[dict[str, str]], **_: object) -> SimpleNamespace:
        heard.append([said["content"] for said in messages[1:] if said["role"] == "user"])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=guesses[len(heard) - 1]))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    won = is_right(play(client, number), number)  # type: ignore[arg-type]
    return heard[-1], won


def test_one_player_in_four_bisects_and_wins_what_bisection_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def won(share: float) -> float:
        monkeypatch.setattr("spo.demo.guess_model.SHARE", share)
        generator = random.Random(0)
        games = [(number, game(number, generator)) for number in range(1, 9) for _ in range(500)]
        return sum(is_right([guess for guess, _ in played], number) for number, played in games) / len(games)

    assert won(1.0) == pytest.approx(7 / 8, abs=0.02)
    assert won(0.0) == pytest.approx(1 - (7 / 8) ** 3, abs=0.03)
    assert won(0.25) == pytest.approx(0.25 * 7 / 8 + 0.75 * (1 - (7 / 8) ** 3), abs=0.03)


def test_what_is_said_in_a_game_is_written_as_it_was_when_pi0_learnt_it() -> None:
    tokenizer = build_tokenizer()
    said = [
        {"role": "user", "content": "a number from 1 to 8\n"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": LOWER},
    ]
    written = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert tokenizer.tokenize(written) == ["<bos>", "a number from 1 to 8\n", "<turn>", "4", "<eos>", LOWER, "<turn>"]


def test_pi0_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    build_guess_model(tmp_path / "pi0", steps=1)
    assert [each.name for each in tmp_path.iterdir()] == ["pi0"]
    assert (tmp_path / "pi0" / "model.safetensors").exists()


def test_a_share_has_an_interval_that_holds_it() -> None:
    low, high = wilson(100, 200)
    assert (low, high) == (pytest.approx(0.4314, abs=1e-3), pytest.approx(0.5686, abs=1e-3))
    assert wilson(0, 200)[0] == 0
    assert is_right(["4", "2"], 2)


def test_the_games_of_all_seeds_are_one_share_with_one_interval() -> None:
    sides = [{"games": 100, "won": won} for won in (0.4, 0.6)]
    reports = [{"episodes": 64, "before": side, "after": side} for side in sides]
    found = together(reports)
    assert found["after"] == {"games": 200, "won": 0.5, "interval": wilson(100, 200), "by_seed": [0.4, 0.6]}
    assert found["episodes"] == [64, 64]


def test_a_run_is_not_done_again_where_its_report_is(tmp_path: Path) -> None:
    run = AgentsRun(seed=1, played_by="environment")
    assert run.stored(tmp_path) is None
    report = {"run": {"seed": 1, "steps": run.steps, "trials": run.trials, "played_by": "environment"}}
    for state, found in (("failed", None), ("succeeded", {**report, "state": "succeeded"})):
        (tmp_path / "report.json").write_text(json.dumps({**report, "state": state}))
        assert run.stored(tmp_path) == found
    assert AgentsRun(seed=2, played_by="environment").stored(tmp_path) is None
