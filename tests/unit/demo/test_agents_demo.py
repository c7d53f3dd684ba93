"""The agents' demo: its job is one that the platform takes, and its players are who they are said to be."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch

from services.verifier.environments.service import Setup, TextGame
from spo.demo.agents import AgentsRun, curve, draw, job_document, together, wilson
from spo.demo.guess import HIGHER, LOWER, Game, game_of, is_right, play
from spo.demo.guess_model import build_guess_model, build_tokenizer, chance, chances, game
from spo.spec.job_spec import parse_job_spec
from spo.tasks.load import load_tasks
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED


@pytest.mark.parametrize("real", [False, True])
def test_the_job_is_one_that_agents_play(tmp_path: Path, real: bool) -> None:
    run = AgentsRun(seed=3, real=real)
    spec = parse_job_spec(job_document(tmp_path, run))
    assert spec.tasks.harness is not None
    assert (spec.tasks.harness.name, spec.seed) == ("guess", 3)
    rows = (tmp_path / "games.jsonl").read_text().splitlines()
    assert len(set(rows)) == len(rows) == (20 if real else 64)
    swapped = {" ".join([*statement.split()[2::-1], "="]) for statement in run.games()}
    assert not real or not {*run.games(), *swapped} & {*run.trial_games()}, "no sum is both trained on and held out"
    assert real or [game_of(statement).number for statement in run.trial_games()] == [*range(1, 9)] * 25
    assert run.games() != AgentsRun(seed=4, real=real).games()
    assert run.trial_games() == AgentsRun(seed=4, real=real).trial_games()


@pytest.mark.parametrize("real", [False, True])
def test_the_same_job_is_played_by_an_environment_whose_words_are_the_programs(tmp_path: Path, real: bool) -> None:
    run = AgentsRun(seed=3, played_by="environment", real=real)
    spec = parse_job_spec(job_document(tmp_path, run))
    assert spec.tasks.harness is None
    problems = load_tasks(spec.tasks).train
    numbers = {game_of(statement) for statement in run.games()}
    assert {problem.statement for problem in problems} == {game.asked for game in numbers}
    for problem in problems:
        setup = Setup(**{name: json.loads(problem.environment_json)[name] for name in ("arguments", "problem")})
        begun = TextGame().begin(setup, 0)
        assert begun.text == "", "the statement is all that is shown before the first guess"
        (played,) = (
            each for each in numbers if (each.asked, each.number) == (problem.statement, begun.state["number"])
        )
        right = str(played.number)
        for guesses in itertools.product(["1", "4", "999", "x", f" 2 or {right}"], repeat=3):
            heard, won = by_program(played, guesses)
            state = begun.state
            for guess, answer in zip(guesses, [*heard, None], strict=False):
                reply = TextGame().step(setup, state, guess)
                state = reply.state
                assert (reply.done, reply.text) == (answer is None, answer or "")
            assert reply.verdict is not None
            assert (reply.verdict.outcome == OUTCOME_ACCEPTED) is won


def test_jobs_that_are_compared_by_age_differ_in_the_window_of_their_episodes_alone(tmp_path: Path) -> None:
    fresh, old = (
        parse_job_spec(job_document(tmp_path, AgentsRun(played_by="environment", age=age))) for age in (2, 20)
    )
    assert [spec.replay.mix[0].max_age_versions for spec in (fresh, old)] == [2, 20]
    # Two rows of each episode, and 64 of a step: 32 episodes come with each version.
    assert [spec.replay.online_capacity for spec in (fresh, old)] == [64, 640]
    same = {"mix": old.replay.mix, "online_capacity": old.replay.online_capacity}
    assert fresh.model_copy(update={"replay": fresh.replay.model_copy(update=same)}) == old
    assert fresh.trainer.update_interval == 1


def by_program(game: Game, guesses: Sequence[str], ends: str = "stop") -> tuple[list[str], bool]:
    """What the program tells a policy that guesses so, and whether it has won then."""
    heard: list[list[str]] = []

    def create(messages: list[dict[str, str]], **_: object) -> SimpleNamespace:
        heard.append([said["content"] for said in messages[1:] if said["role"] == "user"])
        message = SimpleNamespace(content=guesses[len(heard) - 1])
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=ends)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    won = is_right(play(client, game), game.number)  # type: ignore[arg-type]
    return heard[-1], won


def test_an_answer_that_has_no_end_loses_the_game() -> None:
    assert by_program(game_of("20 + 22 ="), ["42", "42", "42"], ends="length") == ([], False)
    assert by_program(game_of("20 + 22 ="), ["41", "42"]) == (["higher: 20 + 22 ="], True)


def test_an_answer_that_leaves_no_room_for_the_next_loses_the_game_and_other_refusals_do_not() -> None:
    def client(code: str) -> Any:
        def refuse(**_: object) -> None:
            response = httpx.Response(400, request=httpx.Request("POST", "http://session"))
            raise openai.BadRequestError("refused", response=response, body={"code": code})

        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=refuse)))

    assert play(client("context_length_exceeded"), game_of("20 + 22 =")) == [0]
    with pytest.raises(openai.BadRequestError):
        play(client("invalid_request"), game_of("20 + 22 ="))


def test_one_player_in_four_bisects_and_wins_what_bisection_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def won(share: float) -> float:
        monkeypatch.setattr("spo.demo.guess_model.SHARE", share)
        generator = random.Random(0)
        games = [(number, game(number, generator)) for number in range(1, 9) for _ in range(500)]
        return sum(is_right([int(guess) for guess, _ in played], number) for number, played in games) / len(games)

    assert won(1.0) == pytest.approx(7 / 8, abs=0.02)
    assert won(0.0) == pytest.approx(1 - (7 / 8) ** 3, abs=0.03)
    assert won(0.25) == pytest.approx(0.25 * 7 / 8 + 0.75 * (1 - (7 / 8) ** 3), abs=0.03)


@pytest.mark.parametrize(("player", "wins"), [("bisects", 7 / 8), ("at random", 1 - (7 / 8) ** 3), ("always 3", 1 / 8)])
def test_the_chance_to_win_is_that_of_all_games(player: str, wins: float) -> None:
    numbers = build_tokenizer().get_vocab()
    guesses = [numbers[str(number)] for number in range(1, 9)]

    def logits(said: list[int]) -> torch.Tensor:
        likely = torch.full((len(numbers),), -1e9)
        low, high = 1, 8
        for guess, answer in zip(said[3::4], said[5::4], strict=False):
            number = guesses.index(guess) + 1
            low, high = (number + 1, high) if answer == numbers[HIGHER] else (low, number - 1)
        if said[-1] != numbers["<turn>"]:
            likely[numbers["<eos>"]] = 0
        elif player == "at random":
            likely[guesses] = 0
        else:
            likely[numbers["3" if player == "always 3" else str((low + high) // 2)]] = 0
        return likely

    def model(input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.stack([logits(said)[None] for said in input_ids.tolist()]))

    assert chance(model, numbers) == pytest.approx(wins, abs=1e-5)  # type: ignore[arg-type]


def test_the_chance_of_each_version_is_reckoned_from_its_own_weights(tmp_path: Path) -> None:
    for steps in (1, 60):
        build_guess_model(tmp_path / str(steps), steps=steps)
    version = tmp_path / "versions" / "00000003"
    version.mkdir(parents=True)
    shutil.copy(tmp_path / "60" / "model.safetensors", version)

    found = chances(tmp_path / "1", tmp_path / "versions")

    assert list(found) == [0, 3]
    assert found[3] == chances(tmp_path / "60", tmp_path / "versions")[0] > 2 * found[0]


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
    assert is_right([4, 2], 2)


def test_the_games_of_all_seeds_are_one_share_with_one_interval() -> None:
    sides = [{"games": 100, "won": won} for won in (0.4, 0.6)]
    reports = [{"episodes": 64, "before": side, "after": side} for side in sides]
    found = together(reports)
    assert found["after"] == {"games": 200, "won": 0.5, "interval": wilson(100, 200), "by_seed": [0.4, 0.6]}
    assert found["episodes"] == [64, 64]


def test_curves_are_chances_by_step_where_they_are_known_and_means_of_batches_where_not(tmp_path: Path) -> None:
    tiny = {"run": {"steps": 64}, "chances": {"0": 0.4, "8": 0.5, "16": 0.6}}
    real = {"run": {"steps": 8}, "rewards": [-1, -1, -1, -0.6, -0.5, -0.5, -0.5, -0.5]}
    assert curve(tiny) == ([0, 32, 64], [0.4, 0.5, 0.6])
    assert curve(real) == ([2, 6], [pytest.approx(0.1), 0.5])
    draw({"program": [tiny, tiny], "environment": [tiny]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_is_not_done_again_where_its_report_is(tmp_path: Path) -> None:
    run = AgentsRun(seed=1, played_by="environment")
    assert run.stored(tmp_path) is None
    report = {"run": json.loads(json.dumps(vars(run)))}
    for state, found in (("failed", None), ("succeeded", {**report, "state": "succeeded"})):
        (tmp_path / "report.json").write_text(json.dumps({**report, "state": state}))
        assert run.stored(tmp_path) == found
    assert AgentsRun(seed=2, played_by="environment").stored(tmp_path) is None
