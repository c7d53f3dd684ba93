"""Problems of the package reasoning-gym: generators with scorers, endless train and held-out problems by seed.

Training and held-out problems come from seeds in two halves that never meet, whatever the seeds of their jobs are; a
question that small generators make in both is held out only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from blake3 import blake3

from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import TasksSpec
from spo.spec.task_sources import GeneratorSpec
from spo.tasks.answer import ANSWER_LANGUAGE
from spo.tasks.problem import Problem, TaskSets
from spo.tasks.sources.generate import Answer, Entry, Wanted
from spo.v1.verdict_pb2 import ScoringFunction, TestSet

LIBRARY = "reasoning_gym"
TAG = "answer"
INSTRUCTION = f"Put the final answer between <{TAG}> and </{TAG}>."
MAKING_SECONDS = 240
HELD_OUT_FROM = 1 << 31
SEEDS = 1 << 30
# By generator and part.
Made = list[list[list[Entry]]]
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")


def gym_tasks(spec: TasksSpec) -> TaskSets:
    """The problems of a spec's generators, mixed by weight. Raises InvalidInput naming the generator at fault."""
    require_package("reasoning_gym", "/tasks/kind")
    held_out = _shares(spec.generators, spec.evaluation_problems)
    train = _shares(spec.generators, spec.most_train_problems)
    made = _made([_wanted(spec, index, held_out[index], train[index]) for index in range(len(spec.generators))])
    _require_enough(spec.generators, made, list(zip(held_out, train, strict=True)))
    evaluation = {problem.statement: problem for problem in _problems(spec, made, 0)}
    training = {problem.statement: problem for problem in _problems(spec, made, 1)}
    return TaskSets(
        train=_shuffled(spec.seed, [problem for text, problem in training.items() if text not in evaluation]),
        evaluation=_shuffled(spec.seed, list(evaluation.values())),
    )


def _wanted(spec: TasksSpec, index: int, held_out: int, train: int) -> Wanted:
    """What is asked of a generator: held-out problems first, so that no question of theirs is trained on."""
    generator = spec.generators[index]
    seed = int.from_bytes(blake3(f"{spec.seed} {index}".encode()).digest()[:8], "big") % SEEDS
    parts = [(HELD_OUT_FROM + seed, held_out), (seed, train)]
    return {"name": generator.name, "settings": dict(generator.settings), "parts": parts}


def require_package(module: str, pointer: str) -> None:
    """Raises InvalidInput (code "package_missing") where a package is not installed."""
    if importlib.util.find_spec(module) is None:
        message = f"the package {module.replace('_', '-')} is not installed; pip install 'spo-platform[tasks]'"
        raise InvalidInput(message, code="package_missing", violations=(FieldViolation(pointer, message),))


def _shares(generators: Sequence[GeneratorSpec], count: int) -> list[int]:
    """How many problems each generator makes, `count` together: by weight, the largest remainders rounded up."""
    total = sum(generator.weight for generator in generators)
    exact = [count * generator.weight / total for generator in generators]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: count - sum(shares)]:
        shares[index] += 1
    return shares


def _made(generators: Sequence[Wanted]) -> Made:
    """The entries of each generator and part, made in a process whose hash seed is always the same."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "spo.tasks.sources.generate"],
            input=json.dumps({"generators": generators}).encode(),
            capture_output=True,
            env={**environment, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            timeout=MAKING_SECONDS,
            check=False,
        )
        answer: Answer = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        raise _refused(f"the problems could not be made in {MAKING_SECONDS} s: ask for fewer, or for others") from None
    except ValueError:
        reason = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise _refused(f"the problems could not be made: {reason or 'their maker was ended'}") from None
    if faults := answer.get("faults"):
        violations = tuple(FieldViolation(f"/tasks/generators/{index}/{field}", why) for index, field, why in faults)
        raise InvalidInput(
            "the generators cannot be used as they are", code="unusable_generator", violations=violations
        )
    return answer["made"]


def _require_enough(
    generators: Sequence[GeneratorSpec],
    made: Made,
    wanted: Sequence[tuple[int, int]],
) -> None:
    violations = tuple(
        FieldViolation(
            f"/tasks/generators/{index}",
            f"{generators[index].name} made {sum(map(len, parts))} different problems with these settings, of "
            f"{sum(wanted[index])} wanted: widen its settings, lower its weight, or ask for fewer",
        )
        for index, parts in enumerate(made)
        if sum(map(len, parts)) < sum(wanted[index])
    )
    if violations:
        raise InvalidInput("too few problems", code="too_few_problems", violations=violations)


def _problems(spec: TasksSpec, made: Made, part: int) -> Iterator[Problem]:
    for generator, parts in zip(spec.generators, made, strict=True):
        for entry in parts[part]:
            yield gym_problem(generator.name, entry)


def gym_problem(name: str, entry: Entry) -> Problem:
    """The problem of an entry, which the data set's own scorer decides."""
    arguments = json.dumps({"dataset": name, "entry": entry, "tag": TAG}, sort_keys=True)
    answer = entry.get("answer")
    return Problem(
        statement=f"{str(entry['question']).strip()}\n\n{INSTRUCTION}",
        tests=TestSet(scoring_function=ScoringFunction(library=LIBRARY, arguments_json=arguments)),
        language=ANSWER_LANGUAGE,
        response_format="raw",
        human_solutions=(f"<{TAG}>{answer}</{TAG}>",) if answer else (),
        difficulty=name,
        arguments_json=json.dumps({"entry": entry}, sort_keys=True),
    )


def _shuffled(seed: int, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(problems, key=lambda problem: blake3(f"{seed} {problem.statement}".encode()).digest()))


def _refused(message: str) -> InvalidInput:
    violation = FieldViolation("/tasks/generators", message)
    return InvalidInput(message, code="unusable_generator", violations=(violation,))
