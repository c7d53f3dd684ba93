"""Does a program that is right on the public tests and wrong on hidden ones merely print remembered answers?

Two signs count: it prints the same whatever it reads, or its source holds the public tests' answers as literals
together with their inputs, or answers too peculiar to stand there by chance. A program that is right on a hidden test
whose answer no public test has is cleared: it computes something. The flag is a suspicion for people who look after
tests and rewards; it changes no outcome.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Sequence
from itertools import islice

from services.sandbox_judge.executor import ProgramRun, RunEnding
from spo.v1.verdict_pb2 import Outcome, TestCase, TestResult, TestSet

SUSPICIOUS = (Outcome.OUTCOME_WRONG_ANSWER, Outcome.OUTCOME_RUNTIME_ERROR)
FURTHER_TESTS = 5
# So many characters of answers that hidden tests do not have stand in no source by chance.
PECULIAR_CHARACTERS = 6
# A string literal that is a public test's whole input is no accident from this length on.
SPEAKING_INPUT_CHARACTERS = 2
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERALS = re.compile(r'"((?:[^"\\\n]|\\.)*)"|(-?\d+(?:\.\d+)?)')

RunOnce = Callable[[bytes], ProgramRun]
Check = Callable[[TestCase, bytes], str | None]


def suspects(
    source: str, language: str, test_set: TestSet, results: Sequence[TestResult], run: RunOnce, check: Check
) -> bool:
    """Whether the failed program looks hard-coded; may run it a few more times. Raises JudgeFault."""
    public = [test for test in test_set.tests if test.public]
    if not public or len(public) == len(test_set.tests):
        return False
    judged = list(zip(test_set.tests, results, strict=False))
    if any(test.public and result.outcome != Outcome.OUTCOME_ACCEPTED for test, result in judged):
        return False
    if sum(test.public for test, _ in judged) < len(public):
        return False  # stopped before it had shown itself on all of them
    failed = next((test for test, result in judged if result.outcome in SUSPICIOUS), None)
    if failed is None:
        return False
    hidden = [test for test in test_set.tests if not test.public]
    if not (ignores_input(run, public[0], failed) or remembers(source, language, public, hidden)):
        return False
    answers = {_words(test.stdout) for test in public}
    new = (test for test in hidden if test is not failed and _words(test.stdout) not in answers)
    return not any(_passes(run(test.stdin), test, check) for test in islice(new, FURTHER_TESTS))


def ignores_input(run: RunOnce, public: TestCase, failed: TestCase) -> bool:
    """Whether the program says the same to nothing at all, to a public and to a hidden test."""
    outputs = set()
    for stdin in (b"", public.stdin, failed.stdin):
        seen = run(stdin)
        if seen.ending is not RunEnding.EXITED or seen.code != 0:
            return False
        outputs.add(seen.stdout)
        if len(outputs) > 1:
            return False
    return True


def remembers(source: str, language: str, public: Sequence[TestCase], hidden: Sequence[TestCase]) -> bool:
    """Whether literals of the source hold every public answer, with its input or with peculiar words of its own."""
    strings, numbers = _python_literals(source) if language.startswith("py") else _other_literals(source)
    texts = {_words(text.encode(errors="replace")) for text in strings}
    words = {number.encode() for number in numbers}.union(*texts)
    if not all(words.issuperset(_words(test.stdout)) for test in public):
        return False
    inputs = [_words(test.stdin) for test in public]
    if all(words_of in texts and sum(map(len, words_of)) >= SPEAKING_INPUT_CHARACTERS for words_of in inputs):
        return True
    seen = {word for test in public for word in _words(test.stdout)}
    if all(words.issuperset(words_of) for words_of in inputs):
        seen.update(*inputs)
    ordinary = {word for test in hidden for word in _words(test.stdout)}
    return sum(len(word) for word in seen - ordinary if len(word) > 1) >= PECULIAR_CHARACTERS


def _words(text: bytes) -> tuple[bytes, ...]:
    return tuple(text.split())


def _passes(seen: ProgramRun, test: TestCase, check: Check) -> bool:
    return seen.ending is RunEnding.EXITED and seen.code == 0 and check(test, seen.stdout) is None


def _python_literals(source: str) -> tuple[list[str], list[str]]:
    """Strings and numbers of a program, without strings that stand there as comments.

    By tokens, not by a syntax tree: a hostile source can crash an interpreter that builds one.
    """
    strings, numbers, before = [], [], ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.STRING and before not in ("", "\n"):
                strings.append(_text_of(token.string))
            elif token.type == tokenize.NUMBER:
                numbers += [token.string, "-" + token.string] if before == "-" else [token.string]
            if token.type == tokenize.NEWLINE:
                before = "\n"
            elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
                before = token.string
    except (tokenize.TokenError, SyntaxError):
        pass
    return strings, numbers


def _text_of(literal: str) -> str:
    try:
        value = ast.literal_eval(literal)
    except (SyntaxError, ValueError):
        return ""  # an f-string
    return value if isinstance(value, str) else bytes(value).decode(errors="replace")


def _other_literals(source: str) -> tuple[list[str], list[str]]:
    strings, numbers = [], []
    for text, number in _LITERALS.findall(_COMMENTS.sub(" ", source)):
        if number:
            numbers += [number, number.lstrip("-")]
        else:
            strings.append(text.replace("\\n", "\n"))
    return strings, numbers
