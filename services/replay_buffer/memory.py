"""What a run remembers: the right answers that it has found to each prompt, to be learned again (source `memory`).

Memory is a function of the ledger: of each prompt the `replay.memory.per_prompt` distinct answers that were found last.
A member that leaves the window moves from the sorted set of its source to that of `memory` and stays in Redis; whoever
lost its mirror reads both sets again and has the same memory. In the record of a batch, what was drawn from memory is
marked: one trajectory may be in a batch twice, as a fresh sample and as a memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np

from services.replay_buffer.windows import Candidate
from spo.algorithm.replay_sampling import draw_ranks
from spo.spec.job_spec import JobSpec
from spo.v1.prompt_pb2 import SOURCE_MEMORY
from spo.v1.trajectory_pb2 import Trajectory

# Ids are word characters, dots and dashes.
_MARK = "*"
# Appended to a serialized trajectory: of a field that stands twice the last one counts.
_SERVED_AS_MEMORY = Trajectory(source=SOURCE_MEMORY).SerializeToString()


def marked(trajectory_id: str) -> str:
    """An id as a batch's record names it where it was drawn from memory."""
    return trajectory_id + _MARK


def is_marked(recorded: str) -> bool:
    """Whether a batch's record says that this was drawn from memory."""
    return recorded.endswith(_MARK)


def without_mark(recorded: str) -> str:
    """The trajectory's id in a batch's record."""
    return recorded.removesuffix(_MARK)


def ids_of(record: bytes | None) -> list[str]:
    """The ids of trajectories in a batch's record, without marks; [] for none."""
    return [without_mark(name) for name in record.decode().split()] if record else []


def as_memory(payload: bytes) -> bytes:
    """A serialized trajectory as a term on `memory` reads it."""
    return payload + _SERVED_AS_MEMORY


class Memory:
    """The mirror of one run's memory; the order in which trajectories are added makes no difference."""

    def __init__(self, spec: JobSpec) -> None:
        self._per_prompt = spec.replay.memory.per_prompt
        self._min_reward = spec.replay.memory.min_reward
        # Prompt -> digest of an answer -> insertion number and candidate of its newest occurrence.
        self._answers: dict[str, dict[str, tuple[int, Candidate]]] = {}
        # Sorted: what is drawn must not depend on the order in which a process met them.
        self._prompts: list[str] = []

    def add(self, candidate: Candidate, number: int) -> None:
        """Remember a trajectory with its insertion number, if it is an answer that memory wants."""
        reward = candidate.rewards[0]
        wanted = candidate.correct if self._min_reward is None else reward >= self._min_reward
        if not wanted:
            return
        if candidate.prompt_id not in self._answers:
            self._answers[candidate.prompt_id] = {}
            insort(self._prompts, candidate.prompt_id)
        answers = self._answers[candidate.prompt_id]
        if self._min_reward is not None:
            best = max((known.rewards[0] for _, known in answers.values()), default=reward)
            if reward < best:
                return
            if reward > best:
                answers.clear()
        if number > answers.get(candidate.digest, (0, None))[0]:
            answers[candidate.digest] = (number, candidate)
        if len(answers) > self._per_prompt:
            del answers[min(answers, key=lambda digest: answers[digest][0])]

    def drop(self, gone: set[str]) -> None:
        """Forget what has left Redis."""
        for prompt_id, answers in list(self._answers.items()):
            for digest, (_, candidate) in list(answers.items()):
                if candidate.trajectory_ids[0] in gone:
                    del answers[digest]
            if not answers:
                del self._answers[prompt_id]
                del self._prompts[bisect_left(self._prompts, prompt_id)]

    def draw(self, rng: np.random.Generator, count: int, prompts: Iterable[str] | None = None) -> list[Candidate]:
        """Draw `count` answers: no prompt again before each had its turn, the answers of a prompt alike.

        prompts: sorted; those that may be drawn, None for all. There must be one.
        """
        known = self._prompts if prompts is None else list(prompts)
        return [self._one(rng, known[rank]) for rank in draw_ranks(rng, len(known), count)]

    def prompts(self) -> list[str]:
        """Prompts with an answer, sorted."""
        return self._prompts

    def members(self) -> set[str]:
        """Ids of all trajectories that may be drawn."""
        return {candidate.trajectory_ids[0] for found in self._answers.values() for _, candidate in found.values()}

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def _one(self, rng: np.random.Generator, prompt_id: str) -> Candidate:
        answers = sorted(self._answers[prompt_id].values(), key=lambda answer: answer[0])
        return answers[int(rng.integers(len(answers)))][1]
