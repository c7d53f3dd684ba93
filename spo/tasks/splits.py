"""Which problems of local files are trained on and which are held out."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from blake3 import blake3

from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.tasks.decontaminate import ContaminationIndex
from spo.tasks.problem import Problem, TaskSets

Reader = Callable[[str], Iterator[Problem]]


def split_problems(spec: TasksSpec, read: Reader, read_evaluation: Reader, *, are_parted: bool = False) -> TaskSets:
    """Return at most `train_problems` and exactly `evaluation_problems`; no problem, nor a copy of it, in both.

    The choice depends on the seed and the rows alone, not on the order of the files. are_parted: they are known to have
    no copies of each other, which costs up to a minute to find out. What is left out is counted in the notes.
    """
    repeated, copies = Counter[str](), Counter[str]()
    training = _of_difficulty(read(spec.path or ""), spec.difficulties)
    if spec.evaluation_path is None:
        count = spec.most_train_problems + spec.evaluation_problems
        chosen = _choose(_distinct(training, repeated), count, spec.seed)
        evaluation, train = chosen[: spec.evaluation_problems], chosen[spec.evaluation_problems :]
    else:
        held_out = list(read_evaluation(spec.evaluation_path))
        evaluation = _choose(_distinct(held_out, Counter()), spec.evaluation_problems, spec.seed)
        # Against all of the file, so that another seed's held-out problems were not trained on either.
        training = _distinct(training, repeated)
        if not are_parted:
            instruction = spec.huggingface.instruction if spec.huggingface else ""
            index = ContaminationIndex(held_out, spec.near_duplicate_similarity, instruction)
            training = index.without_copies(training, copies)
        train = _choose(training, spec.most_train_problems, spec.seed)
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
    return TaskSets(train=tuple(train), evaluation=tuple(evaluation), notes=_notes(repeated, copies))


def _of_difficulty(problems: Iterable[Problem], difficulties: tuple[str, ...]) -> Iterator[Problem]:
    return (problem for problem in problems if not difficulties or problem.difficulty in difficulties)


def _choose(problems: Iterable[Problem], count: int, seed: int) -> list[Problem]:
    """Keep the `count` problems whose seeded digest is smallest: a shuffle that holds only those in memory."""

    def rank(problem: Problem) -> tuple[bytes, str]:
        # Rows of one statement that differ in their arguments are spread like others.
        told = f"{seed} {problem.statement}{problem.arguments_json}"
        return blake3(told.encode()).digest(), problem.row_digest

    return heapq.nsmallest(count, problems, key=rank)


def _distinct(problems: Iterable[Problem], repeated: Counter[str]) -> Iterator[Problem]:
    """The problems without those that are another's in all that decides; counts them."""
    seen: set[str] = set()
    for problem in problems:
        if problem.row_digest in seen:
            repeated["rows"] += 1
        else:
            seen.add(problem.row_digest)
            yield problem


def _notes(repeated: Counter[str], copies: Counter[str]) -> tuple[str, ...]:
    told = []
    if repeated:
        told.append(f"{repeated.total()} rows that say what another says are left out")
    if copies:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in copies.most_common())
        told.append(f"{copies.total()} training problems are left out as copies of held-out ones ({reasons})")
    return tuple(told)
