"""What the studies of learning rest on: the age of samples, grades, log-probs, anchors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.studies import baselines, memory as memory_study
from benchmarks.studies.collect import remembering_table
from benchmarks.studies.contest import Contest
from benchmarks.studies.grading import Grader
from benchmarks.studies.lag import steps_sampled_by
from benchmarks.studies.memory import (
    COMPARED,
    FIXED,
    JOINING,
    LOSSES,
    Memory,
    MemoryRun,
    Part,
    best_rate,
    next_of_search,
    next_run,
    rate_to_try,
    run_of,
)
from benchmarks.studies.sampling import Sampler, sample
from benchmarks.studies.staleness import GROUP, LAGS, METHODS, RATES, STEPS, StaleRun, planned, rows
from spo.algorithm.objectives import TokenBatch
from spo.model.logprobs import response_logprobs
from spo.tasks.toy import toy_tasks
from spo.testing.trainer import random_llama
from spo.v1.prompt_pb2 import SOURCE_REFERENCE
from spo.v1.trajectory_pb2 import Trajectory


@pytest.mark.parametrize(("lag", "steps"), [(0, 7), (1, 7), (3, 7), (6, 7), (7, 7), (50, 7)])
def test_each_batch_is_sampled_once_by_the_policy_of_so_many_updates_before(lag: int, steps: int) -> None:
    sampled_at = {step: updates for updates in range(steps) for step in steps_sampled_by(updates, lag, steps)}
    assert sum(len(steps_sampled_by(updates, lag, steps)) for updates in range(steps)) == steps
    ages = [step - 1 - sampled_at[step] for step in range(1, steps + 1)]
    assert ages == [min(lag, step - 1) for step in range(1, steps + 1)]


def test_rates_are_searched_at_each_age_and_the_best_is_run_with_the_other_seeds() -> None:
    runs = planned({("spo", 10): 5e-4}, [0, 1, 2])
    searched = {(run.method, run.lag, run.rate) for run in runs if run.seed == 0}
    assert searched == {(method, lag, rate) for method in METHODS for lag in LAGS for rate in RATES}
    assert [vars(run) for run in runs if run.seed] == [vars(StaleRun("spo", 10, 5e-4, seed)) for seed in (1, 2)]


def test_a_baseline_whose_search_is_complete_goes_on_with_its_best_rate() -> None:
    scores = {("dapo", rate, 0): 0.5 + rate for rate in RATES} | {("grpo", RATES[0], 0): 0.9}
    runs = baselines.planned(scores, [0, 1])
    assert [(run.method, run.rate) for run in runs if run.seed] == [("dapo", max(RATES))]


def test_grades_are_those_of_the_tests_and_a_program_that_does_not_end_spoils_no_other() -> None:
    (problem,) = toy_tasks(1, 0, 0).train
    endless = "b=[1]\nfor x in b:\n b.append(x)\n"
    programs = [endless, *problem.human_solutions, *problem.wrong_solutions, "print(", endless]
    grades = Grader().grade([problem] * len(programs), programs)
    right = len(problem.human_solutions)
    assert grades == [False] + [True] * right + [False] * (len(programs) - 1 - right)


def test_the_samplers_log_probs_are_the_models_however_rows_end() -> None:
    model = random_llama(3)
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]] * 6
    # Of what is likely some, so that rows end at different lengths.
    end = int(model(torch.tensor([prompts[0]])).logits[0, -1].topk(5).indices[-1])
    found = sample(model, prompts, Sampler(end, 12), torch.Generator().manual_seed(0))
    responses = [tokens for tokens, _ in found]
    assert len({len(tokens) for tokens in responses}) > 1
    assert all(end not in tokens[:-1] for tokens in responses)
    expected = response_logprobs(model, prompts, responses, 4096)
    assert [logprobs for _, logprobs in found] == [pytest.approx(each, abs=1e-4) for each in expected]


@pytest.fixture
def group() -> list[Trajectory]:
    return [
        Trajectory(
            prompt_id="p",
            prompt_token_ids=[1],
            response_token_ids=[2, 3],
            sampling_logprobs=[-1.0, -2.0],
            reference_logprobs=[-3.0, -4.0],
            reward=0.0 if number == 0 else -1.0,
        )
        for number in range(GROUP)
    ]


def test_oapl_regresses_from_its_sampler_and_spo_from_pi0(group: list[Trajectory]) -> None:
    contest = cast(Contest, type("Values", (), {"qhat_0": {"p": -0.25}}))
    spo = rows(group, StaleRun("spo", 10, 1e-3, 0).spec(Path("/models/pi0")), contest)
    oapl = rows(group, StaleRun("oapl", 10, 1e-3, 0).spec(Path("/models/pi0")), contest)
    assert {(*row.trajectory.reference_logprobs, row.qhat_0) for row in spo} == {(-3.0, -4.0, -0.25)}
    soft_mean = torch.tensor([0.0] + [-1.0] * (GROUP - 1)).exp().mean().log().item()
    assert {tuple(row.trajectory.reference_logprobs) for row in oapl} == {(-1.0, -2.0)}
    assert [row.qhat_0 for row in oapl] == [pytest.approx(soft_mean)] * GROUP
    assert list(group[0].reference_logprobs) == [-3.0, -4.0]


def test_memory_keeps_distinct_right_answers_and_knows_which_prompts_lack_one() -> None:
    def tried(prompt_id: str, *outcomes: tuple[int, bool]) -> list[Trajectory]:
        return [
            Trajectory(prompt_id=prompt_id, response_token_ids=[tokens], reward=0.0 if right else -1.0)
            for tokens, right in outcomes
        ]

    memory = Memory()
    memory.add(tried("a", (1, True), (1, True), (2, True), (3, False)))
    memory.add(tried("b", (1, False), (2, False)))
    memory.add(tried("a", (4, False), (5, False)))

    assert memory.solved == ["a"]
    assert memory.lacking("unsolved") == ["b"]
    assert memory.lacking("lost") == ["b", "a"]
    again = memory.answers(6, "turn", random.Random(0))
    assert {tuple(each.response_token_ids) for each in again} == {(1,), (2,)}
    assert {each.source for each in again} == {SOURCE_REFERENCE}


@pytest.mark.parametrize(
    ("found", "rate"),
    [
        ({}, 5e-4),
        ({5e-4: 0.5}, 1e-3),
        ({5e-4: 0.5, 1e-3: 0.7}, 2e-3),
        ({5e-4: 0.5, 1e-3: 0.7, 2e-3: 0.6}, None),
        ({5e-4: 0.5, 1e-3: 0.7, 2e-3: 0.8}, 4e-3),
        ({5e-4: 0.8, 1e-3: 0.7}, 2.5e-4),
        ({2.5e-4: 0.6, 5e-4: 0.8, 1e-3: 0.7}, None),
        # The end of the ladder is one side of the bracket.
        ({4e-3: 0.1, 8e-3: 0.2, 5e-4: 0.0, 1e-3: 0.0}, None),
    ],
)
def test_a_search_goes_on_until_the_best_rate_lies_between_two_worse_ones(
    found: dict[float, float], rate: float | None
) -> None:
    assert rate_to_try(found) == rate


def test_rates_that_are_close_are_told_apart_by_more_seeds() -> None:
    found = {2.5e-4: {0: 0.6}, 5e-4: {0: 0.71}, 1e-3: {0: 0.75}, 2e-3: {0: 0.5}}
    asked = []
    while (lacking := next_of_search(found)) is not None:
        rate, seed = lacking
        asked.append(lacking)
        found[rate][seed] = 0.8 if rate == 5e-4 else 0.7
    assert asked == [(5e-4, 1), (5e-4, 2), (1e-3, 1), (1e-3, 2)]
    assert best_rate(found) == 5e-4
    # What three seeds make the best has a worse one on both sides too.
    assert next_of_search({5e-4: {0: 0.71, 1: 0.8, 2: 0.8}, 1e-3: {0: 0.75, 1: 0.7, 2: 0.7}, 2e-3: {0: 0.5}}) == (
        2.5e-4,
        0,
    )
    # One of them is far ahead: its one seed decides.
    assert next_of_search({5e-4: {0: 0.6}, 1e-3: {0: 0.8}, 2e-3: {0: 0.7}}) is None


def test_a_contestants_seeds_follow_its_search_at_the_rate_that_was_best_on_other_problems() -> None:
    done: dict[MemoryRun, float] = {}
    while len(done) < 10:
        run = next_run(done, [0, 1])
        assert run is not None
        done[run] = 1 - 400 * abs(run.rate - 5e-4)
        assert run_of({**vars(run), "correct": {}}) == run
    first = [run for run in done if run.contestant == MemoryRun(**COMPARED[0]).contestant and run.setting == "p160"]
    assert [(run.rate, run.searched, run.seed) for run in first] == [
        (5e-4, True, 0),
        (1e-3, True, 0),
        (2.5e-4, True, 0),
        (5e-4, False, 0),
        (5e-4, False, 1),
    ]
    assert len({run.name for run in done}) == 10


@pytest.mark.parametrize("part", FIXED)
def test_a_part_with_given_rates_carries_out_each_of_its_runs_once_with_each_seed(part: Part) -> None:
    done: dict[MemoryRun, float] = {}
    while (run := next_run(done, [0, 1], part)) is not None:
        done[run] = 0.5
        assert run_of({**vars(run), "correct": {}}) == run
        run.spec(Path("/models/pi0"))
    assert len(done) == 2 * len(FIXED[part])
    assert len({run.name for run in done}) == len(done)


def test_samples_come_from_weights_that_are_so_many_updates_old(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    contest = cast(Contest, type("World", (), {"pi0": Path("/models/pi0"), "tasks": toy_tasks(8, 1, 0)}))

    class Counting:
        """Its only weight is the number of its updates."""

        def __init__(self, *_: object) -> None:
            self.model = torch.nn.Linear(1, 1)
            torch.nn.init.zeros_(self.model.weight)

        def learn(self, _: object) -> None:
            with torch.no_grad():
                self.model.weight += 1

    def sampled(_: object, model: torch.nn.Linear, *__: object) -> list[list[Trajectory]]:
        made.append(model.weight.item())
        return [[Trajectory(prompt_id="p", reward=-1.0)]]

    monkeypatch.setattr(memory_study, "Policy", Counting)
    monkeypatch.setattr(memory_study, "_sampled", sampled)
    monkeypatch.setattr(memory_study, "_examine", lambda *_: None)
    memory_study.carry_out(MemoryRun("grpo", lag=3), contest)
    assert made[:6] == [0, 0, 0, 0, 1, 2]
    assert made[-1] == STEPS - 1 - 3


def test_answers_join_groups_that_are_all_wrong_and_known() -> None:
    memory, wrong = Memory(), [Trajectory(prompt_id="a", response_token_ids=[9], reward=-1.0)]
    rng = random.Random(0)
    assert memory.joining(wrong, 5, rng) == []
    right = [Trajectory(prompt_id="a", response_token_ids=[token], reward=0.0) for token in range(4)]
    memory.add([*right, *wrong])
    assert memory.joining([right[0], *wrong], 5, rng) == []
    joined = memory.joining(wrong, 5, rng)
    assert len(joined) == len({tuple(each.response_token_ids) for each in joined}) == JOINING
    assert memory.joining(wrong, 1, rng)[0].reward == 0


def test_memory_keeps_the_newest_answers_and_what_is_found_again_is_new() -> None:
    memory, rng = Memory(kept=2), random.Random(0)
    answers = [Trajectory(prompt_id="a", response_token_ids=[token], reward=0.0) for token in range(3)]
    memory.add([answers[0], answers[1], answers[0], answers[2]])
    assert list(memory.right["a"]) == [(0,), (2,)]
    memory.add([Trajectory(prompt_id="b", response_token_ids=[9], reward=0.0)])
    assert [each.prompt_id for each in memory.answers(4, "turn", rng)].count("b") == 2
    assert sorted(each.prompt_id for each in memory.answers(4, "once", rng)) == ["a", "b"]


def test_balanced_groups_are_half_right_and_of_prompts_with_enough_wrong_answers() -> None:
    memory, rng = Memory(kept=8), random.Random(0)
    wrong = [Trajectory(prompt_id="a", response_token_ids=[token], reward=-1.0) for token in range(5)]
    right = [Trajectory(prompt_id="a", response_token_ids=[9 + token], reward=0.0) for token in range(6)]
    memory.add([*right, *wrong[:3]])
    assert memory.balanced(1, rng) == []
    memory.add(wrong[3:])
    memory.add([Trajectory(prompt_id="b", response_token_ids=[1], reward=0.0)])
    (group,) = memory.balanced(3, rng)
    assert [each.reward for each in group] == [0.0] * 4 + [-1.0] * 4
    assert len({tuple(each.response_token_ids) for each in group}) == GROUP


def test_the_table_has_a_row_of_runs_that_do_not_say_what_they_solved() -> None:
    """TRL's trainers do not."""
    run = {**vars(MemoryRun("trl_grpo")), "contestant": "trl_grpo", "cpu_seconds": 90.0, "solved": {}}
    run |= {"correct": {"150": [20, 0]}, "at_one": {"150": 0.4}, "distinct": {"150": 2.0}}
    (row,) = [line for line in remembering_table([run, {**run, "seed": 1}]) if "trl" in line]
    assert row.split(" | ")[5:] == ["0.40", "", "2.0", "90 |"]


def test_losses_of_relatives_follow_their_papers() -> None:
    mask_BL = torch.ones(4, 2, dtype=torch.bool)
    sampled_BL = torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.25, 0.5], [0.5, 0.25]]))
    logprobs_BL = torch.log(torch.tensor([[0.5, 0.5], [0.5, 1.0], [0.5, 0.5], [0.25, 0.25]])).requires_grad_()
    batch = TokenBatch(
        input_ids_BL=mask_BL.long(),
        attention_mask_BL=mask_BL,
        response_mask_BL=mask_BL,
        reference_logprobs_BL=sampled_BL,
        sampling_logprobs_BL=sampled_BL,
        reward_B=torch.tensor([0.0, -1.0, -1.0, 0.0]),
        qhat_0_B=torch.zeros(4),
        source_B=torch.tensor([1, 1, 1, 2]),
        group_B=torch.tensor([0, 0, 1, 1]),
    )

    def gradient(name: str) -> list[float]:
        logprobs_BL.grad = None
        LOSSES[name](logprobs_BL, batch).backward()
        assert logprobs_BL.grad is not None
        return (4 * logprobs_BL.grad[:, 0]).tolist()

    # Advantages .5 and -.5, the baseline .1 below the mean.
    assert gradient("asymre") == pytest.approx([-0.6, 0.4, 0.4, -0.6])
    # Wrong ones by pi / mu of the response, at most 1: 2 and 2 here.
    assert gradient("topr") == pytest.approx([-1.0, 1.0, 1.0, -1.0])
    # Advantages of a group of two over its deviation: .7071; of what is replayed the slope of w / (w + .1) at w = .5.
    share = 0.5**0.5 / 2
    assert gradient("exgrpo") == pytest.approx([-share, share, 2 * share, -share * 0.1 * 0.5 / 0.6**2], rel=1e-4)
