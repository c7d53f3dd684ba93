"""The agents' demo: its job is one that the platform takes, and its players are who they are said to be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spo.demo.agents import job_document, wilson
from spo.demo.guess import LOWER, is_right
from spo.demo.guess_model import build_guess_model, build_tokenizer, game
from spo.spec.job_spec import parse_job_spec


def test_the_job_is_one_that_agents_play(tmp_path: Path) -> None:
    spec = parse_job_spec(job_document(tmp_path, seed=3))
    assert spec.tasks.harness is not None
    assert (spec.tasks.harness.name, spec.seed) == ("guess", 3)
    rows = (tmp_path / "games.jsonl").read_text().splitlines()
    assert len(set(rows)) == 64


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
