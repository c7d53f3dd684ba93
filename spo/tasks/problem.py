"""What a task set is made of: statements, what decides the reward, responses known to be right or wrong."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from blake3 import blake3

from spo.tasks.extraction import fenced_program, language_tag
from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_UNSPECIFIED, Limits, TestSet

ResponseFormat = Literal["raw", "fenced", "fenced_last"]
# What is told a row's arguments, so that its tests hold them.
_TOLD: tuple[Literal["scoring_function", "http", "composition"], ...] = ("scoring_function", "http", "composition")

DEFAULT_LIMITS = Limits(cpu_seconds=2.0, wall_seconds=10.0, memory_bytes=256 << 20, output_bytes=1 << 20, processes=16)


@dataclass(frozen=True)
class Problem:
    """One problem of a task set; `difficulty` is the published level or, in the toy contest, the tier.

    tests: of a program in `language`, or the rule for an answer in the language "text", whose solutions are responses.
    arguments_json: what else of it a scoring function or service is told, as a JSON object. verifier: the name of that
    of the job's which decides, where it has several. place: where a person finds it in its file.
    """

    statement: str
    tests: TestSet
    language: str = "python"
    response_format: ResponseFormat = "raw"
    human_solutions: tuple[str, ...] = ()
    wrong_solutions: tuple[str, ...] = ()
    difficulty: str = ""
    arguments_json: str = ""
    verifier: str = ""
    place: str = field(default="", compare=False)
    # The environment that answers the policy's turns, and how it is set up; "": a single turn.
    environment: str = ""
    environment_json: str = ""

    @cached_property
    def tests_digest(self) -> str:
        """Return the address of this problem's tests."""
        return tests_digest(self.tests)

    @cached_property
    def problem_id(self) -> str:
        """Return the digest of all that decides a reward, so that values of this problem outlive a run."""
        parts = [self.statement, self.language, self.response_format, self.tests_digest]
        if self.environment:
            parts += [self.environment, self.environment_json]
        elif self.arguments_json and not any(self.tests.HasField(told) for told in _TOLD):
            parts.append(self.arguments_json)
        return _digest_of(parts)

    @cached_property
    def row_digest(self) -> str:
        """Return the digest of all that makes its row another problem than others, before a verifier has been applied:
        what decides, and what of it a verifier or an environment is told."""
        return _digest_of([self.problem_id, self.arguments_json, self.verifier])

    @property
    def public_tests(self) -> TestSet:
        """Return the same judge settings with only the tests that may be shown to the policy."""
        public = TestSet()
        public.CopyFrom(self.tests)
        del public.tests[:]
        public.tests.extend(test for test in self.tests.tests if test.public)
        return public

    @property
    def shows_public_tests(self) -> bool:
        """Whether a program has public tests whose outcome may be shown."""
        return any(test.public for test in self.tests.tests)

    @cached_property
    def public_tests_digest(self) -> str:
        """Return the address of the public tests alone."""
        return tests_digest(self.public_tests)


@dataclass(frozen=True)
class TaskSets:
    """Training and held-out problems of one job; notes: what its person should know of how they were chosen."""

    train: tuple[Problem, ...]
    evaluation: tuple[Problem, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)


def _digest_of(parts: Iterable[str]) -> str:
    digest = blake3()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


def tests_digest(test_set: TestSet) -> str:
    """Return the blake3 hex digest of the deterministic serialisation: the address of a TestSet everywhere."""
    return blake3(test_set.SerializeToString(deterministic=True)).hexdigest()


def write_response(program: str, response_format: ResponseFormat, language: str = "python") -> str:
    """Return the response that holds `program`, for programs that people wrote: the inverse of `extract_program`."""
    return program if response_format == "raw" else f"```{language_tag(language)}\n{program.rstrip()}\n```"


def program_of(trajectory: Trajectory, response_format: str, language: str = "") -> str:
    """Cut the program out of a trajectory's response; what was reasoned before the answer holds none.

    Of a conversation, the last action is the answer.
    """
    begin, end = _last_action(trajectory)
    text = trajectory.response_text[max(begin, trajectory.reasoning_characters) : end]
    return extract_program(text, response_format, language)


def has_verdict(trajectory: Trajectory) -> bool:
    """Whether its environment has decided about the trajectory, so that no judge is asked."""
    return trajectory.HasField("verdict") and trajectory.verdict.outcome != OUTCOME_UNSPECIFIED


def _last_action(trajectory: Trajectory) -> tuple[int, int]:
    """Where the last action begins and ends in the response's text; all of it where there was a single turn."""
    place, found = 0, (0, len(trajectory.response_text))
    for segment in trajectory.segments:
        if segment.kind == SEGMENT_KIND_ACTION:
            found = place, place + segment.characters
        place += segment.characters
    return found


def extract_program(response_text: str, response_format: str, language: str = "") -> str:
    """Cut the program out of an answer: `raw` is the text itself, `fenced` a block of code or else the text.

    `fenced_last` takes the last good block where `fenced` takes the first; docs/extraction.md says which are good.
    language: as the task names it; "": not known. Time linear in the text, whatever it holds.
    """
    last = response_format == "fenced_last"
    found = None if response_format == "raw" else fenced_program(response_text, language, last=last)
    return response_text if found is None else found
