"""Which tests in code can be kept apart from the response: what they do is read from their text, nothing is run.

Only the text of the tests decides: what a response does can never bring it into their interpreter.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import lru_cache

from spo.v1.verdict_pb2 import CodeTests, CodeTestStyle, TestIsolation

# Libraries whose use by the tests says nothing about the response's own objects, files or processes.
_COMPUTING = frozenset(
    [
        "__future__",
        "abc",
        "array",
        "asyncio",
        "base64",
        "binascii",
        "bisect",
        "builtins",
        "calendar",
        "cmath",
        "codecs",
        "collections",
        "colorsys",
        "contextlib",
        "copy",
        "csv",
        "dataclasses",
        "datetime",
        "decimal",
        "difflib",
        "doctest",
        "enum",
        "errno",
        "fractions",
        "functools",
        "graphlib",
        "hashlib",
        "heapq",
        "hmac",
        "html",
        "hypothesis",
        "io",
        "ipaddress",
        "itertools",
        "json",
        "keyword",
        "math",
        "numbers",
        "numpy",
        "operator",
        "os",
        "pathlib",
        "pprint",
        "pytest",
        "queue",
        "random",
        "re",
        "scipy",
        "secrets",
        "solution",
        "stat",
        "statistics",
        "string",
        "struct",
        "sys",
        "textwrap",
        "time",
        "timeit",
        "token",
        "traceback",
        "types",
        "typing",
        "typing_extensions",
        "unicodedata",
        "unittest",
        "urllib",
        "uuid",
        "warnings",
        "zlib",
        "zoneinfo",
    ]
)
# Names of otherwise harmless libraries that reach for what a proxy does not have.
_REACHING = {
    "dataclasses": {"asdict", "astuple", "fields", "is_dataclass", "replace"},
    "sys": {"modules", "settrace", "setprofile", "_getframe", "_current_frames", "getrefcount", "getsizeof"},
    "warnings": {"catch_warnings"},
    "pytest": {"warns", "deprecated_call", "importorskip"},
    "unittest": {"assertWarns", "assertLogs", "assertNoLogs"},
}
# What paths do beyond naming a place.
_OF_FILES = frozenset(
    [
        *("read_text", "write_text", "read_bytes", "write_bytes", "open", "touch", "mkdir", "rmdir", "unlink"),
        *("exists", "is_file", "is_dir", "iterdir", "glob", "rglob", "stat", "lstat", "rename", "replace", "resolve"),
        *("samefile", "symlink_to", "hardlink_to", "chmod", "owner", "cwd", "home", "walk"),
    ]
)
_OF_OS = frozenset({"path", "linesep", "sep", "devnull"})
_METHODS = frozenset({"assertWarns", "assertWarnsRegex", "assertLogs", "assertNoLogs"})
_FIXTURES = frozenset(
    {"tmp_path", "tmp_path_factory", "tmpdir", "tmpdir_factory", "caplog", "recwarn", "pytester", "testdir"}
)
_PATCHES = frozenset({"setenv", "delenv", "chdir", "syspath_prepend"})
# What may be replaced for the response from the tests' process, beside its own names.
_REPLACEABLE = ("solution.", "builtins.input", "builtins.print", "sys.stdin", "sys.stdout", "sys.stderr")
_MOST_REASONS = 5
Tree = ast.Module


def is_shared(tests: CodeTests) -> bool:
    """Whether response and tests are judged in one interpreter."""
    if tests.isolation != TestIsolation.TEST_ISOLATION_UNSPECIFIED:
        return tests.isolation == TestIsolation.TEST_ISOLATION_SHARED
    return bool(reasons_to_share(tests))


def reasons_to_share(tests: CodeTests) -> tuple[str, ...]:
    """Why tests cannot be kept apart from a response; empty where they can, or are no program."""
    return _reasons(tests.style, tests.before, tests.code)


def runs_nothing(tests: CodeTests) -> bool:
    """Whether tests in the module style only define and import: they would accept every response."""
    if tests.style not in (CodeTestStyle.CODE_TEST_STYLE_UNSPECIFIED, CodeTestStyle.CODE_TEST_STYLE_MODULE):
        return False
    try:
        body = ast.parse(tests.code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not any(map(_runs, body))


def _runs(statement: ast.stmt) -> bool:
    """Whether a statement at the top of a module does more than to define."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
            return False
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return False
        case ast.Assign(value=ast.Constant() | ast.List() | ast.Tuple() | ast.Dict() | ast.Name() as value):
            return any(isinstance(node, ast.Call) for node in ast.walk(value))
        case _:
            return True


@lru_cache(maxsize=512)
def _reasons(style: int, before: str, code: str) -> tuple[str, ...]:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = [*_imports(tree), *_uses(tree), *_replacements(tree), *_derived(tree, _classes(style, before))]
    return tuple(dict.fromkeys(found))[:_MOST_REASONS]


def _imports(tree: Tree) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
            for name in [name for name in names if name.split(".")[0] not in _COMPUTING]:
                yield f"line {node.lineno} imports {name}"


def _uses(tree: Tree) -> Iterator[str]:
    paths = any(_module_of(node) == "pathlib" for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            library = node.value.id
            if node.attr in _REACHING.get(library, ()) or (
                library == "os" and node.attr not in ("path", "linesep", "sep")
            ):
                yield f"line {node.lineno} uses {library}.{node.attr}"
        if isinstance(node, ast.Attribute) and paths and node.attr in _OF_FILES:
            yield f"line {node.lineno} uses files by {node.attr}"
        if isinstance(node, ast.Attribute) and node.attr in _METHODS:
            yield f"line {node.lineno} uses {node.attr}"
        if isinstance(node, ast.ImportFrom) and (names := _reaching(node)):
            yield f"line {node.lineno} uses {node.module}.{names[0]}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "open" and not _is_nowhere(node):
            yield f"line {node.lineno} opens a file"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            wanted = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)} & _FIXTURES
            yield from (f"line {node.lineno} takes {name}" for name in sorted(wanted))


def _module_of(node: ast.AST) -> str:
    """The module of an import, the first of several."""
    if isinstance(node, ast.Import):
        return node.names[0].name
    return node.module or "" if isinstance(node, ast.ImportFrom) else ""


def _is_nowhere(call: ast.Call) -> bool:
    return bool(call.args) and ast.unparse(call.args[0]) in ("'/dev/null'", "os.devnull", "devnull")


def _reaching(node: ast.ImportFrom) -> list[str]:
    module = (node.module or "").split(".")[0]
    names = {alias.name for alias in node.names}
    if node.module == "os":
        return sorted(names - _OF_OS)
    return sorted(names & _REACHING.get(module, set()))


def _replacements(tree: Tree) -> Iterator[str]:
    """Parts of libraries that the tests replace for the response, which has its own."""
    libraries = _library_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).split(".")
        if called[-1] in _PATCHES:
            yield f"line {node.lineno} uses {called[-1]}"
        elif called[-1] == "patch" or (called[-1] in ("setattr", "delattr") and called[0] == "monkeypatch"):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                if not target.value.startswith(_REPLACEABLE):
                    yield f"line {node.lineno} replaces {target.value[:60]}"
            elif target is not None and _root(target) in libraries:
                yield f"line {node.lineno} replaces a part of {_root(target)}"
        elif called[-2:-1] == ["patch"] and node.args and not _is_own(called[-1], node.args[0], libraries):
            yield f"line {node.lineno} replaces {ast.unparse(node.args[0])[:60]}"


def _is_own(method: str, target: ast.expr, libraries: set[str]) -> bool:
    return method == "object" and _root(target) not in libraries


def _library_names(tree: Tree) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names if alias.name != "solution"}
        elif isinstance(node, ast.ImportFrom) and node.module != "solution":
            names |= {alias.asname or alias.name for alias in node.names}
    return names - {"builtins", "sys"}


def _derived(tree: Tree, classes: set[str]) -> Iterator[str]:
    """Classes of the tests that are derived from one of the response's."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {node.name for node in found} | _library_names(tree) | vars(builtins).keys()
    for one in found:
        for base in one.bases:
            if _root(base) in classes or _root(base) not in own:
                yield f"line {one.lineno} derives a class from {ast.unparse(base)[:60]}"


def _classes(style: int, before: str) -> set[str]:
    if style == CodeTestStyle.CODE_TEST_STYLE_PYTEST:
        return set()
    try:
        return {node.name for node in ast.walk(ast.parse(before)) if isinstance(node, ast.ClassDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
