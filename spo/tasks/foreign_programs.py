"""Rows of other projects that tests decide: programs, and calls of functions as APPS, LiveCodeBench, SYNTHETIC-2 and
EvalPlus publish them.

A response that names its function otherwise than its tests do is wrong whatever it does, so the name is added to a
statement that lacks it.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence

from spo.errors import InvalidInput
from spo.tasks.foreign_answers import Fields, Taken, Wish, answer_problem, asked, right_answer
from spo.tasks.problem import DEFAULT_LIMITS, INSTRUCTION, Problem, ask_for_program, first_distinct, make_test_set
from spo.tasks.records import COMPARISONS, parse_json
from spo.v1.verdict_pb2 import AnswerExtraction, Checker, CodeTestStyle, TestCase

# verl's sources whose ground truth is tests.
VERL_PROGRAMS = ("codecontests", "apps", "codeforces", "taco")
# Tests unpacked from LiveCodeBench's columns.
_MOST_UNPACKED = 64 << 20
_ASKS_FOR_CODE = re.compile(
    r"```|python|stdin|standard input|class Solution|\bdef \w|\b(write|implement) (a|an|the) [\w ]*(program|function)",
    re.IGNORECASE,
)
_BUILTINS = frozenset(dir(builtins))
_CHECKS = """import json

CALLS = json.loads({calls!r})


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


for arguments, right in CALLS:
    found = plain({target}(*arguments))
    assert any(found == wanted for wanted in right), "expected " + repr(right[0])[:200] + ", found " + repr(found)[:200]
"""
_REFERENCE = """import copy
import json
import math

CALLS = json.loads({calls!r})
TOLERANCE = {tolerance!r}
reference = {{}}
exec({right!r}, reference)


def same(found, wanted):
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(found, (list, tuple)) and len(found) == len(wanted) and all(map(same, found, wanted))
        )
    if isinstance(wanted, float) and isinstance(found, (int, float)):
        return found == wanted or math.isclose(found, wanted, rel_tol=1e-7, abs_tol=TOLERANCE)
    return found == wanted


for arguments in CALLS:
    wanted = reference[{name!r}](*copy.deepcopy(arguments))
    found = {name}(*copy.deepcopy(arguments))
    assert same(found, wanted), "expected " + repr(wanted)[:200] + ", found " + repr(found)[:200]
"""


def problem_row(problem: Problem) -> dict[str, object]:
    """A problem as a line of the platform's own format has it: what `jsonl_problem` reads back."""
    row: dict[str, object] = {"statement": problem.statement}
    tests = problem.tests
    if tests.HasField("answer"):
        rule = tests.answer
        names = {number: name for name, number in COMPARISONS.items()}
        row["answer"] = {
            "expected": list(rule.expected),
            "comparison": names[rule.comparison],
            "extraction": AnswerExtraction.Name(rule.extraction).removeprefix("ANSWER_EXTRACTION_").lower(),
            **({"marker": rule.marker} if rule.marker else {}),
        }
    elif tests.HasField("code_tests"):
        style = CodeTestStyle.Name(tests.code_tests.style).removeprefix("CODE_TEST_STYLE_").lower()
        given = {name: getattr(tests.code_tests, name) for name in ("before", "code", "entry_point")}
        row["code_tests"] = {"style": style, **{name: text for name, text in given.items() if text}}
    else:
        row["tests"] = [
            {"stdin": case.stdin.decode(), "stdout": case.stdout.decode(), **({"public": True} if case.public else {})}
            for case in tests.tests
        ]
        row["response_format"] = problem.response_format
        if (checker := Checker.Name(tests.checker).removeprefix("CHECKER_").lower()) not in ("tokens", "unspecified"):
            row |= {"checker": checker, "absolute_tolerance": tests.absolute_tolerance}
        most = {"cpu_seconds": 600.0, "wall_seconds": 3600.0, "memory_bytes": 1 << 40}
        limits = {name: min(getattr(tests.limits, name), limit) for name, limit in most.items()}
        usual = {name: getattr(DEFAULT_LIMITS, name) for name in most}
        if limits != usual and all(limits.values()):
            row["limits"] = limits | {"memory_bytes": max(int(limits["memory_bytes"]), 1 << 20)}
    for name in ("human_solutions", "wrong_solutions"):
        if solutions := getattr(problem, name):
            row[name] = list(solutions)
    return row | ({"difficulty": problem.difficulty} if problem.difficulty else {})


def program(statement: str, cases: Sequence[TestCase], solutions: Sequence[str] = (), system: str = "") -> Taken:
    """The problem of a program's tests; one ```python block is asked for where the statement asks for no code."""
    if not cases:
        raise ValueError("the problem has no tests")
    added = "" if _ASKS_FOR_CODE.search(f"{system}\n{statement}") else INSTRUCTION
    problem = Problem(
        statement=ask_for_program(statement) if added else statement,
        tests=make_test_set(list(cases), 0.0, 0),
        response_format="fenced_last",
        human_solutions=first_distinct(bare_program(text) for text in solutions),
    )
    return Taken((problem_row(problem),), added=added, system=system)


def function(
    statement: str, name: str, code: str, *, before: str = "", solutions: Sequence[str] = (), system: str = ""
) -> Taken:
    """The problem of a function's tests, whose name the statement says."""
    added = "" if re.search(rf"\b{re.escape(name)}\b", f"{system}\n{statement}") else f"Name the function `{name}`."
    if not _ASKS_FOR_CODE.search(f"{system}\n{statement}"):
        added = f"Write a Python function `{name}`. Answer with it in one ```python code block."
    # Of a method, what the response has to define is its class.
    entry_point = "Solution" if "Solution()." in code else name
    tests: dict[str, object] = {"style": "module", "code": code, "entry_point": entry_point}
    row: dict[str, object] = {
        "statement": f"{statement.rstrip()}\n\n{added}" if added else statement,
        "code_tests": tests | ({"before": before} if before else {}),
        "response_format": "fenced_last",
    }
    if right := first_distinct(bare_program(text) for text in solutions):
        row["human_solutions"] = list(right)
    return Taken((row,), added=added, system=system)


def bare_program(text: str) -> str:
    """A program without the fence that some sets keep around it."""
    found = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.DOTALL)
    return found[1] if found else text


def calls_of_function(name: str, calls: Sequence[tuple[object, Sequence[object]]], *, is_method: bool) -> str:
    """Code that calls a function, or a method of the class Solution, and compares; calls: arguments, right results."""
    target = f"Solution().{name}" if is_method else name
    return _CHECKS.format(calls=json.dumps(calls), target=target)


def decided_by_tests(
    statement: str, tests: object, fields: Fields, system: str = "", solutions: Sequence[str] = ()
) -> Taken:
    """The problem of APPS's form of tests: inputs and outputs of a program, or of fn_name; ValueError otherwise."""
    found = as_json(tests, "the tests")
    if isinstance(found, Sequence) and not isinstance(found, str):
        return _typed_tests(statement, found, fields, system, solutions)
    if not isinstance(found, Mapping):
        raise ValueError("the tests are no object")
    if asserts := found.get("assert_case"):
        code = (
            "\n".join(map(str, asserts))
            if isinstance(asserts, Sequence) and not isinstance(asserts, str)
            else str(asserts)
        )
        return asserted(statement, code, solutions=solutions, system=system)
    if "test_cases" in found:
        return _typed_tests(statement, as_json(found["test_cases"], "test_cases"), fields, system, solutions)
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError("the tests have no inputs and as many outputs")
    if name := found.get("fn_name"):
        starter = str(fields.get("starter_code") or "")
        calls = [(_arguments(given), _right_results(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
        is_method = "class Solution" in f"{starter}{statement}"
        code = calls_of_function(_function_name(name), calls, is_method=is_method)
        if starter and starter.strip() not in statement:
            statement = f"{statement.rstrip()}\n\nBegin with:\n```python\n{starter.rstrip()}\n```"
        return function(statement, str(name), code, solutions=solutions, system=system)
    cases = [
        TestCase(stdin=_lines(given), stdout=_lines(wanted)) for given, wanted in zip(inputs, outputs, strict=True)
    ]
    return program(statement, cases, solutions, system)


def _typed_tests(statement: str, tests: object, fields: Fields, system: str, solutions: Sequence[str]) -> Taken:
    """Tests that each say what they are: stdin_stdout, or function_call with fn_name."""
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError("the problem has no tests")
    each = [test if isinstance(test, Mapping) else {} for test in tests]
    if not all("input" in test and "output" in test for test in each):
        raise ValueError("a test has no input or no output")
    names = {str(test["fn_name"]) for test in each if test.get("fn_name")}
    if not names:
        cases = [
            TestCase(stdin=_lines(test["input"]), stdout=_lines(test["output"]), public=bool(test.get("public")))
            for test in each
        ]
        return program(statement, cases, solutions, system)
    if len(names) > 1 or not all(test.get("fn_name") for test in each):
        raise ValueError("the tests call several functions")
    columns = {"fn_name": names.pop(), **{f"{side}s": [test[side] for test in each] for side in ("input", "output")}}
    return decided_by_tests(statement, columns, fields, system, solutions)


def _arguments(given: object) -> list[object]:
    given = _literal(given)
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _right_results(wanted: object) -> list[object]:
    """What a call may give: APPS wraps some results in a list of one, and does not say which."""
    wanted = _literal(wanted)
    return [wanted, wanted[0]] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]


def _literal(text: object) -> object:
    """The value of a text that is JSON or a literal of Python's, else the text."""
    if not isinstance(text, str):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            found: object = read(text)
            json.dumps(found)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return found
    return text


def _lines(side: object) -> bytes:
    if isinstance(side, Sequence) and not isinstance(side, str | bytes):
        return "\n".join(map(str, side)).encode()
    return str(side).encode()


def _function_name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name {str(name)[:60]!r} is no name of a function")
    return name


def as_json(value: object, what: str) -> object:
    """A column that holds JSON as text or as what it says."""
    if not isinstance(value, str):
        return value
    try:
        found: object = parse_json(value, what)
    except InvalidInput as error:
        raise ValueError(error.message[:200]) from None
    return found


def asserted(statement: str, code: str, *, before: str = "", solutions: Sequence[str] = (), system: str = "") -> Taken:
    """The problem of bare asserts, whose first line the statement shows, since it names the function."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests cannot be compiled: {error}") from None
    called = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    own = _names_made_by(tree) | _BUILTINS
    defined = _defined(solutions)
    name = next((each for each in called if each in defined), "") or next(
        (each for each in called if each not in own), ""
    )
    if not name:
        raise ValueError("the tests call no function of the response")
    if not re.search(rf"\b{name}\b", statement):
        shown = next(
            (line.strip() for line in code.splitlines() if name in line and line.lstrip().startswith("assert")), ""
        )
        if shown and len(shown) < 400:
            statement = f"{statement.rstrip()}\n\nYour function should pass this test:\n```python\n{shown}\n```"
    return function(statement, name, code, before=before, solutions=solutions, system=system)


def _names_made_by(tree: ast.Module) -> set[str]:
    """What tests define, assign or import themselves."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _defined(programs: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for text in programs[:1]:
        try:
            tree = ast.parse(bare_program(text))
        except (SyntaxError, ValueError, RecursionError):
            continue
        found |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return found


def verl_program(fields: Fields, wish: Wish) -> Taken:
    """The problem of a row of verl whose ground truth is tests."""
    statement, system = asked(fields)
    return decided_by_tests(statement, right_answer(fields, wish), fields, system)


def verified_by_itself(fields: Fields, wish: Wish) -> Taken:
    """The problem of a row of SYNTHETIC-1 and -2 or Open-R1, whose `verification_info` says how it is verified."""
    found = as_json(fields["verification_info"], "verification_info")
    statement, system = asked(fields, ("prompt", "problem_statement", "problem", "question"))
    kind = str(fields.get("task_type") or "")
    if not isinstance(found, Mapping):
        raise ValueError("verification_info is no object")
    if "test_cases" in found:
        language = str(found.get("language") or "python").lower()
        if not language.startswith("python"):
            raise ValueError(f"its tests are of {language[:40]}, and functions are judged in Python alone")
        gold = fields.get("gold_standard_solution")
        return decided_by_tests(statement, found, fields, system, [gold] if isinstance(gold, str) else [])
    if kind in ("", "verifiable_math") and (right := found.get("ground_truth", found.get("answer"))) is not None:
        return answer_problem(fields, wish, expected=right)
    raise ValueError(f"task type {kind[:60] or 'unknown'!r} needs a verifier of its own: see docs/verifiers.md")


def apps(fields: Fields, _wish: Wish) -> Taken:
    """The problem of a row of APPS or TACO."""
    statement = str(fields.get("question") or "")
    if not statement.strip():
        raise ValueError("question is empty")
    solutions = as_json(fields.get("solutions") or [], "solutions")
    programs = [text for text in solutions if isinstance(text, str)] if isinstance(solutions, Sequence) else []
    taken = decided_by_tests(statement, fields["input_output"], fields, solutions=programs)
    difficulty = str(fields.get("difficulty") or "").lower()
    return Taken((taken.rows[0] | ({"difficulty": difficulty} if difficulty else {}),), added=taken.added)


def live_code_bench(fields: Fields, _wish: Wish) -> Taken:
    """The problem of a row of LiveCodeBench; its packed tests are read without being unpickled."""
    statement = str(fields["question_content"])
    tests = [*_tests_of_column(fields.get("public_test_cases")), *_tests_of_column(fields.get("private_test_cases"))]
    public = len(_tests_of_column(fields.get("public_test_cases")))
    starter = str(fields.get("starter_code") or "")
    if not starter.strip() and not any(test.get("testtype") == "functional" for test in tests):
        each = [{**test, "public": place < public} for place, test in enumerate(tests)]
        return _typed_tests(statement, each, fields, "", ())
    about = as_json(fields.get("metadata") or {}, "metadata")
    name = about.get("func_name") if isinstance(about, Mapping) else None
    if not name and (found := re.findall(r"def (\w+)\(", starter)):
        name = found[-1]
    calls: list[tuple[object, Sequence[object]]] = [
        ([_literal(line) for line in str(test.get("input", "")).split("\n") if line], [_literal(test.get("output"))])
        for test in tests
    ]
    code = calls_of_function(_function_name(name), calls, is_method="class Solution" in starter)
    statement = f"{statement.rstrip()}\n\nBegin with:\n```python\n{starter.rstrip()}\n```"
    return function(statement, str(name), code)


def _tests_of_column(packed: object) -> list[Mapping[str, object]]:
    """Tests of a column: JSON, or JSON that was pickled, packed and written in base 64."""
    if not packed:
        return []
    try:
        found = as_json(packed, "tests")
    except ValueError:
        found = as_json(_unpacked(str(packed)), "tests")
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ValueError("a column of tests is no list")
    return [test for test in found if isinstance(test, Mapping)]


def _unpacked(text: str) -> str:
    """The one text of a pickle, read from its opcodes: nothing of it is executed."""
    try:
        reader = zlib.decompressobj()
        raw = reader.decompress(base64.b64decode(text, validate=True), _MOST_UNPACKED)
        found = [argument for _, argument, _ in pickletools.genops(raw) if isinstance(argument, str)]
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"private_test_cases cannot be read: {str(error)[:100]}") from None
    if not reader.eof or len(found) != 1:
        raise ValueError("private_test_cases are too large, or no packed text")
    return found[0]


def eval_plus(fields: Fields, _wish: Wish) -> Taken:
    """The problem of a row of HumanEval+ or MBPP+ as EvalPlus publishes them: inputs, and a right solution to compare
    with."""
    name, prompt = _function_name(fields["entry_point"]), str(fields["prompt"])
    inputs = [*_as_list(fields.get("base_input")), *_as_list(fields.get("plus_input"))]
    right = f"{prompt}{fields.get('canonical_solution') or ''}"
    if not inputs:
        raise ValueError("the problem has no inputs")
    tolerance = fields.get("atol")
    code = _REFERENCE.format(
        calls=json.dumps(inputs),
        right=right,
        name=name,
        tolerance=float(tolerance) if isinstance(tolerance, int | float) else 0.0,
    )
    asks = f"Complete this function:\n```python\n{prompt.strip()}\n```" if "def " in prompt else prompt
    return function(asks, name, code, solutions=[right])


def _as_list(value: object) -> list[object]:
    value = as_json(value, "inputs")
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []


def mbpp(fields: Fields, _wish: Wish) -> Taken:
    """The problem of a row of MBPP or MBPP+: a sentence, right code, and asserts."""
    statement = str(next((fields[name] for name in ("text", "prompt") if fields.get(name)), ""))
    if not statement:
        raise ValueError("no statement: it is looked for in text, prompt")
    listed = _as_list(fields.get("test_list"))
    test = fields.get("test")
    code = test if isinstance(test, str) and test.strip() else "\n".join(map(str, listed))
    imports = fields.get("test_imports") or fields.get("test_setup_code") or ""
    before = (
        "\n".join(map(str, imports)) if isinstance(imports, Sequence) and not isinstance(imports, str) else str(imports)
    )
    right = fields.get("code")
    solutions = [right] if isinstance(right, str) else []
    if listed and not re.search(r"assert", statement):
        # The name of the function and the order of its arguments stand in the tests alone.
        statement = f"{statement.rstrip()}\n\nYour function should pass this test:\n```python\n{listed[0]}\n```"
    return asserted(statement, code, before=before, solutions=solutions)


def codeforces(fields: Fields, _wish: Wish) -> Taken:
    """The problem of a row of Open-R1's Codeforces."""
    if fields.get("interaction_format"):
        raise ValueError("an interactive problem: see docs/conversations.md")
    if fields.get("generated_checker"):
        raise ValueError("a checker of its own decides: give it as checker_program, docs/judge.md")
    sections = [str(fields.get("description") or "")]
    for name, heading in (("input_format", "Input"), ("output_format", "Output"), ("note", "Note")):
        if fields.get(name):
            sections.append(f"{heading}\n\n{fields[name]}")
    public, hidden = _as_list(fields.get("examples")), _as_list(fields.get("official_tests"))
    shown = [
        f"Example input\n{test['input']}\nExample output\n{test['output']}"
        for test in public
        if isinstance(test, Mapping)
    ]
    statement = "\n\n".join([*sections, *shown])
    each = [
        {**test, "public": is_public}
        for tests, is_public in ((public, True), (hidden, False))
        for test in tests
        if isinstance(test, Mapping)
    ]
    return _typed_tests(ask_for_program(statement), each, fields, "", ())
