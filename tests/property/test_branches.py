"""An episode of several branches is one row: cut at an observation it has the gradient of the uncut one, in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from services.trainer.batches import ForwardLimits, TrainingSample, cut, token_batch
from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.algorithm.registry import LossTerm
from spo.model.chat import branch_lengths, trained_tokens
from spo.model.logprobs import ATTENTION, response_logprobs, token_logprobs
from spo.spec.reward import RewardSpec
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import (
    SEGMENT_KIND_ACTION,
    SEGMENT_KIND_BRANCH,
    SEGMENT_KIND_OBSERVATION,
    Segment,
    SegmentKind,
    Trajectory,
)

PROMPT = [11, 12, 13]
# Tokens of an action and of the observation after it, of four episodes in two groups.
TURNS = [[(2, 3), (4, 1), (3, 0)], [(1, 2), (1, 2), (5, 0)], [(3, 1), (2, 0)], [(4, 4), (1, 0)]]
BETA = 0.3


def episode(number: int, turns: Sequence[tuple[int, int]], cut_after: int | None) -> Trajectory:
    """One path of actions and observations; cut: what follows an observation is a branch that reads all before it."""
    rng = random.Random(number)
    made = Trajectory(
        trajectory_id=f"t{number}",
        prompt_token_ids=PROMPT,
        source=SOURCE_ONLINE,
        reward=-1.0 + 0.3 * number,
        temperature=1,
        top_p=1,
    )
    path = list(PROMPT)

    def append(kind: SegmentKind.ValueType, token_ids: list[int]) -> None:
        made.response_token_ids.extend(token_ids)
        made.sampling_logprobs.extend(
            [-4.15 - 0.02 * rng.random() if kind == SEGMENT_KIND_ACTION else 0.0 for _ in token_ids]
        )
        made.segments.append(Segment(kind=kind, tokens=len(token_ids)))

    for turn, (said, heard) in enumerate(turns):
        action = [rng.randrange(5, 60) for _ in range(said)]
        observation = [rng.randrange(5, 60) for _ in range(heard)]
        append(SEGMENT_KIND_ACTION, action)
        path += [*action, *observation]
        if turn == cut_after:
            append(SEGMENT_KIND_BRANCH, path)
        elif observation:
            append(SEGMENT_KIND_OBSERVATION, observation)
    return made


def model_of(attention: str) -> PreTrainedModel:
    """Llama's norm computes in float32 whatever its weights are in; GPT-2's does not."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    config._attn_implementation = attention
    found = GPT2LMHeadModel(config).eval()
    torch.nn.Module.to(found, torch.float64)
    return found


def in_float64(rows: Sequence[TrainingSample]) -> TokenBatch:
    """The trainer's own tensors, with the reference log-probs of a fixed draw by token."""
    batch = token_batch(rows, BETA, RewardSpec())
    reference_BL = torch.where(batch.response_mask_BL, -0.01 * batch.input_ids_BL.double(), 0.0)
    wide = {name: getattr(batch, name).double() for name in ("sampling_logprobs_BL", "reward_B", "qhat_0_B")}
    return replace(batch, reference_logprobs_BL=reference_BL, qhat_0_error_B=None, **wide)


def gradient(model: PreTrainedModel, rows: Sequence[TrainingSample], term: LossTerm) -> tuple[float, Tensor]:
    batch = in_float64(rows)
    model.zero_grad()
    logprobs_BL = token_logprobs(model, batch.input_ids_BL, batch.attention_mask_BL, batch.response_mask_BL)
    loss, _ = spo_loss(logprobs_BL, batch, [term], BETA)
    loss.backward()
    found = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return loss.item(), torch.cat(found)


def rows_of(cuts: Sequence[int | None]) -> list[TrainingSample]:
    played = [
        episode(number, turns, cut_after) for number, (turns, cut_after) in enumerate(zip(TURNS, cuts, strict=True))
    ]
    return [TrainingSample(each, -0.4, number // 2) for number, each in enumerate(played)]


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
@pytest.mark.parametrize("objective", ["terminal_squared", "group_centred_squared", "grpo", "dapo", "rloo", "dpo"])
def test_an_episode_cut_in_branches_has_the_gradient_of_the_uncut_one(objective: str, attention: str) -> None:
    model, term = model_of(attention), LossTerm(objective=objective)
    loss, gradient_P = gradient(model, rows_of([None] * 4), term)
    cut_loss, cut_gradient_P = gradient(model, rows_of([0, 1, None, 0]), term)

    assert gradient_P.abs().max() > 1e-6
    assert cut_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(cut_gradient_P, gradient_P, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
def test_value_estimation_gives_each_branch_the_logprobs_of_the_uncut_episode(attention: str) -> None:
    model = model_of(attention)
    found = []
    for cuts in ([None] * 4, [0, 1, None, 0]):
        rows = rows_of(cuts)
        batch = in_float64(rows)
        played = [row.trajectory for row in rows]
        trained = [
            batch.response_mask_BL[index, len(PROMPT) : len(PROMPT) + len(each.response_token_ids)].tolist()
            for index, each in enumerate(played)
        ]
        starts = [
            tuple(
                sum(branch_lengths(each)[: number + 1]) - len(PROMPT) for number in range(len(branch_lengths(each)) - 1)
            )
            for each in played
        ]
        given = [list(each.prompt_token_ids) for each in played], [list(each.response_token_ids) for each in played]
        scored = response_logprobs(model, *given, 12, trained, starts)
        assert list(map(len, scored)) == [len(each.response_token_ids) for each in played]
        found.append(
            [
                [value for value, is_action in zip(*each, strict=True) if is_action]
                for each in zip(scored, trained, strict=True)
            ]
        )
    whole, in_branches = found
    assert list(map(len, whole)) == [trained_tokens(row.trajectory) for row in rows_of([None] * 4)]
    for one, other in zip(whole, in_branches, strict=True):
        assert other == pytest.approx(one, rel=1e-12)


def test_padded_forwards_count_each_branch_as_a_row_of_the_longest() -> None:
    rows = rows_of([0, 1, None, 0])
    assert [branch_lengths(row.trajectory) for row in rows] == [[5, 16], [7, 14], [9], [7, 12]]
    found = {}
    for tokens, packed in ((35, False), (36, False), (72, True)):
        (share,) = cut(rows, 1, ForwardLimits(tokens, None, packed=packed), whole_groups=False)
        found[tokens] = [[row.trajectory.trajectory_id for row in part.rows] for part in share]
    # A path of 9 and branches of 7 and 12 are three rows of 12.
    assert found[35] == [["t2"], ["t3"], ["t1"], ["t0"]]
    assert found[36] == [["t2", "t3"], ["t1"], ["t0"]]
    assert found[72] == [["t2", "t3", "t1", "t0"]]
