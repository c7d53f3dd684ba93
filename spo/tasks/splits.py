"""Which problems of local files are trained on and which are held out."""

import heapq
from collections.abc import Callable, Iterable, Iterator

from blake3 import blake3

from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks.decontaminate import ContaminationIndex
from spo.tasks.problem import Problem, TaskSets

Reader = Callable[[str], Iterator[Problem]]


def split_problems(spec: TasksSpec, read: Reader, read_evaluation: Reader, *, are_parted: bool = False) -> TaskSets:
    """Return at most `train_problems` and exactly `evaluation_problems`; no problem, nor a copy of it, in both.

    The choice depends on the seed and the statements alone, not on the order of the files. are_parted: they are known
    to have no copies of each other, which costs up to a minute to find out.
    """
    training = _of_difficulty(read(spec.path or ""), spec.difficulties)
    if spec.evaluation_path is None:
        chosen = _choose(training, spec.most_train_problems + spec.evaluation_problems, spec.seed)
        evaluation, train = chosen[: spec.evaluation_problems], chosen[spec.evaluation_problems :]
    else:
        held_out = list(read_evaluation(spec.evaluation_path))
        evaluation = _choose(held_out, spec.evaluation_problems, spec.seed)
        # Against all of the file, so that another seed's held-out problems were not trained on either.
        index = None if are_parted else ContaminationIndex(held_out, spec.near_duplicate_similarity)
        train = _choose(index.without_copies(training) if index else training, spec.most_train_problems, spec.seed)
    if len(evaluation) < spec.evaluation_problems or not train:
        raise InvalidInput(
            "too few problems",
            code="too_few_problems",
            violations=(
                FieldViolation(
                    "/tasks/evaluation_problems",
                    f"asked to hold out {spec.evaluation_problems}, which leaves {len(train)} of "
                    f"{len(evaluation) + len(train)} problems for training",
                ),
            ),
        )
    return TaskSets(train=tuple(train), evaluation=tuple(evaluation))


def _of_difficulty(problems: Iterable[Problem], difficulties: tuple[str, ...]) -> Iterator[Problem]:
    return (problem for problem in problems if not difficulties or problem.difficulty in difficulties)


def _choose(problems: Iterable[Problem], count: int, seed: int) -> list[Problem]:
    """Keep the `count` problems whose seeded digest is smallest: a shuffle that holds only those in memory."""

    def rank(problem: Problem) -> bytes:
        return blake3(f"{seed} {problem.statement}".encode()).digest()

    return heapq.nsmallest(count, _distinct(problems), key=rank)


def _distinct(problems: Iterable[Problem]) -> Iterator[Problem]:
    seen: set[bytes] = set()
    for problem in problems:
        digest = blake3(problem.statement.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield problem
