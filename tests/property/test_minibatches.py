"""However a batch is cut into minibatches, ranks and pieces, each trajectory is learned from once per epoch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings, strategies as st

from services.trainer.batches import ForwardLimits, Minibatch, TrainingSample, cut_into_minibatches
from spo.v1.trajectory_pb2 import Trajectory


def rows_of(groups: list[int]) -> list[TrainingSample]:
    """One row per response length; `group` is the index of its list entry divided by two."""
    return [
        TrainingSample(
            Trajectory(trajectory_id=str(index), prompt_token_ids=[1], response_token_ids=[2] * length),
            -0.5,
            index // 2,
        )
        for index, length in enumerate(groups)
    ]


def ids(minibatch: Minibatch) -> list[str]:
    return [
        row.trajectory.trajectory_id
        for micro_batch in minibatch.micro_batches
        if not micro_batch.idle
        for row in micro_batch.rows
    ]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.data())
def test_single_trajectories_are_dealt_evenly(
    count: int, world_size: int, each: int, size: int, data: st.DataObject
) -> None:
    total = count * world_size * each
    rows = rows_of(data.draw(st.lists(st.integers(1, 9), min_size=total, max_size=total)))

    shares = cut_into_minibatches(rows, count, world_size, ForwardLimits(1000, size), whole_groups=False)

    assert [len(share) for share in shares] == [count] * world_size
    assert {len(ids(minibatch)) for share in shares for minibatch in share} == {each}
    assert {minibatch.size for share in shares for minibatch in share} == {each * world_size}
    assert sorted(found for share in shares for minibatch in share for found in ids(minibatch)) == sorted(
        row.trajectory.trajectory_id for row in rows
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 5), st.lists(st.integers(1, 9), min_size=2, max_size=24))
def test_whole_groups_stay_in_one_piece_and_ranks_make_equally_many_passes(
    count: int, world_size: int, size: int, lengths: list[int]
) -> None:
    rows = rows_of(lengths[: len(lengths) // 2 * 2])

    shares = cut_into_minibatches(rows, count, world_size, ForwardLimits(1000, size), whole_groups=True)

    for steps in zip(*shares, strict=True):
        assert len({len(minibatch.micro_batches) for minibatch in steps}) == 1
        assert {minibatch.size for minibatch in steps} == {sum(len(ids(minibatch)) for minibatch in steps)}
    found = Counter(each for share in shares for minibatch in share for each in ids(minibatch))
    assert found == Counter(row.trajectory.trajectory_id for row in rows)
    for minibatch in (minibatch for share in shares for minibatch in share):
        for micro_batch in minibatch.micro_batches:
            assert set(Counter(row.group for row in micro_batch.rows).values()) == {2}
