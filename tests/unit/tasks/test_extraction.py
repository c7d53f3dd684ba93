"""Which block of a response is the program: the table of docs/extraction.md, and texts made to hurt the reader."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from spo.tasks.problem import extract_program, fenced_program, write_response

PAGE = Path(__file__).parents[3] / "docs" / "extraction.md"
ROW = re.compile(r"^\| (`{3,}) (.+) \1 \| `(.+)` \| (`{3,}) (.+) \4 \|$", re.MULTILINE)
ROWS = [(row[1], row[2], row[4]) for row in ROW.findall(PAGE.read_text())]


def plain(shown: str) -> str:
    return shown.replace("␍↵", "\r\n").replace("↵", "\n").replace("␣", " ")


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) == PAGE.read_text().count("\n| ````") >= 20


@pytest.mark.parametrize(("response", "language", "program"), ROWS)
def test_a_row_of_the_page_is_what_happens(response: str, language: str, program: str) -> None:
    assert extract_program(plain(response), "fenced", language) == plain(program)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```\nint main() {}\n```\nOutput:\n```\n5\n```", "int main() {}\n"),
        ("```cpp\nint main() {}\n```\n```\n5\n```", "int main() {}\n"),
        ("```\n5\n```\n```Java\nclass A { void main() {} }\n```", "class A { void main() {} }\n"),
    ],
)
def test_where_the_language_is_not_said_any_will_do(response: str, program: str) -> None:
    assert extract_program(response, "fenced") == program


@pytest.mark.parametrize("language", ["python", "pypy3.10", "cpp", "c", "java"])
def test_a_program_by_a_person_is_labelled_with_its_language_and_found_again(language: str) -> None:
    response = write_response("x = f()\n", "fenced", language)

    assert response.startswith(f"```{'python' if 'py' in language else language}\n")
    assert extract_program(response, "fenced", language) == "x = f()\n"


HOSTILE = {
    "parentheses": "(" * 199 + ")" * 199,
    "unary": "-" * 39_000 + "1",
    "sum": "1" + "+1" * 19_000,
    "attributes": "a" + ".a" * 19_000,
    "calls": "f" + "()" * 19_000,
    "indentation": "".join(" " * depth + "if 1:\n" for depth in range(99)),
    "lambdas": "lambda: " * 4_000 + "1",
    "null": "print(1)\0",
    "surrogate": "print('\ud800')",
    "coding": "# coding: no-such-codec\nprint(1)",
    "escapes": "print('\\d')",
    "integer": "print(" + "9" * 30_000 + ")",
    "strings": "f'{" * 100,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_program_crashes_the_reader(name: str) -> None:
    response = f"```python\n{HOSTILE[name]}\n```\n```python\nprint(1)\n```"
    found: list[str | None] = []
    # The judge reads responses in threads, whose stacks are smaller.
    thread = threading.Thread(target=lambda: found.append(fenced_program(response, "python")))
    thread.start()
    thread.join()

    assert len(found) == 1
    assert found[0] in (f"{HOSTILE[name]}\n", "print(1)\n")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["```\na\n", "~~~\n1\n", "```py\n(\n```\n", "```a", "   ```\n   a\n"])
def test_many_blocks_take_linear_time(piece: str) -> None:
    response = piece * (200_000 // len(piece))

    assert extract_program(response, "fenced", "python")


DOCSTRING = 'def f(x):\n    """Twice x.\n\n    ```\n    >>> f(2)\n    4\n    ```\n    """\n    return 2 * x\n'
WITH_FENCES = [
    DOCSTRING,
    DOCSTRING.replace('"""', "'''"),
    DOCSTRING.replace("    ```\n    >>>", "    ```python\n    >>>"),
    "def f(x):\n    '''\n```\nf(1)\n```\n    '''\n    return 1\n",
    'TEXT = """\n```\n"""\nprint(TEXT)\n',
    'A = "#"  # it\'s """ in a comment\nB = \'"""\'\nT = """\n```\n"""\nprint(T)\n',
    'T = """\\"""\n```\n"""\nprint(T)\n',
]


@pytest.mark.parametrize("label", ["python", "", "py"])
@pytest.mark.parametrize("program", WITH_FENCES)
def test_a_fence_within_a_string_ends_no_program(program: str, label: str) -> None:
    response = f"Sure:\n```{label}\n{program}```\nIt prints:\n```text\n4\n```\n"
    assert extract_program(response, "fenced", "python") == program


def test_a_string_that_never_ends_hides_no_fence() -> None:
    response = 'First:\n```python\nx = """\n```\nNo, so:\n```python\nprint(1)\n```\nDone.'
    assert extract_program(response, "fenced", "python") == "print(1)\n"
    assert extract_program(response.replace("python", "cpp"), "fenced", "cpp") == 'x = """\n'


CORRECTED = [
    ("```python\nprint(1)\n```\nWait, no:\n```python\nprint(2)\n```", "print(2)\n"),
    ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)\n"),
    ("```python\nprint(1)\n```\nNo:\n```python\nprint(2\n```", "print(1)\n"),
    ("```python\nprint(1)\n```\nOr:\n```cpp\nint main() {}\n```", "print(1)\n"),
    ("```\nprint(1)\n```\nso\n```python\nprint(2)\n```\nso\n```\nprint(3)\n```", "print(2)\n"),
    ("```python\nprint(1\n```\n```python\nprint(2\n```", "print(2\n"),
    ("print(1)", "print(1)"),
]


@pytest.mark.parametrize(("response", "program"), CORRECTED)
def test_of_a_policy_that_corrects_itself_the_last_good_block_may_be_asked_for(response: str, program: str) -> None:
    assert extract_program(response, "fenced_last", "python") == program
