"""What a task set is made of: statements, the tests that decide the reward, programs known to be right or wrong."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from blake3 import blake3

from spo.v1.verdict_pb2 import Limits, TestSet

ResponseFormat = Literal["raw", "fenced"]

DEFAULT_LIMITS = Limits(cpu_seconds=2.0, wall_seconds=10.0, memory_bytes=256 << 20, output_bytes=1 << 20, processes=16)

_FENCED_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """One problem of a task set; `difficulty` is the published level or, in the toy contest, the tier."""

    statement: str
    tests: TestSet
    language: str = "python"
    response_format: ResponseFormat = "raw"
    human_solutions: tuple[str, ...] = ()
    wrong_solutions: tuple[str, ...] = ()
    difficulty: str = ""

    @cached_property
    def tests_digest(self) -> str:
        """Return the address of this problem's tests."""
        return tests_digest(self.tests)

    @cached_property
    def problem_id(self) -> str:
        """Return the digest of all that decides a reward, so that values of this problem outlive a run."""
        parts = (self.statement, self.language, self.response_format, self.tests_digest)
        digest = blake3()
        for part in parts:
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()

    @property
    def public_tests(self) -> TestSet:
        """Return the same judge settings with only the tests that may be shown to the policy."""
        public = TestSet()
        public.CopyFrom(self.tests)
        del public.tests[:]
        public.tests.extend(test for test in self.tests.tests if test.public)
        return public


@dataclass(frozen=True)
class TaskSets:
    """Training and held-out problems of one job."""

    train: tuple[Problem, ...]
    evaluation: tuple[Problem, ...]


def tests_digest(test_set: TestSet) -> str:
    """Return the blake3 hex digest of the deterministic serialisation: the address of a TestSet everywhere."""
    return blake3(test_set.SerializeToString(deterministic=True)).hexdigest()


def write_response(program: str, response_format: ResponseFormat) -> str:
    """Return the response that holds `program`, for programs that people wrote: the inverse of `extract_program`."""
    return program if response_format == "raw" else f"```python\n{program.rstrip()}\n```"


def extract_program(response_text: str, response_format: str) -> str:
    """Cut the program out of a response: `raw` is the text itself, `fenced` the last python block or else the text."""
    if response_format == "raw":
        return response_text
    blocks = _FENCED_BLOCK.findall(response_text)
    return str(blocks[-1]) if blocks else response_text
