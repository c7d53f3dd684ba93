"""What honest code imports and uses works in the sandbox on every tier: libraries, threads of C++, PyPy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from services.sandbox_judge.executor import languages
from services.sandbox_judge.isolation import TIERS
from services.sandbox_judge.probe import why_not
from services.sandbox_judge.program_judge import JudgeOptions, ProgramJudge
from services.sandbox_judge.sandbox_worker import SandboxWorker
from services.sandbox_judge.scoring import judge_code, score_responses
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import CodeTests, CodeTestStyle, Limits, Outcome, ScoringFunction

LIMITS = Limits(cpu_seconds=20, wall_seconds=60, memory_bytes=2 << 30)
# By module: what a function does with it; each gives 1.
USES = {
    "numpy": """
import numpy as np
def used():
    a = np.ones((400, 400))
    return round(float((a @ a)[0, 0] / 400 * np.linalg.norm(a[:1, :1])), 6)
""",
    "scipy": """
import scipy.optimize, scipy.sparse.linalg, scipy.spatial, numpy as np
def used():
    found = scipy.optimize.minimize(lambda x: (x - 1) @ (x - 1), np.zeros(3))
    return round(float(found.x.mean()), 3)
""",
    "pandas": """
import pandas as pd
def used():
    return float(pd.DataFrame({"a": [1, 1], "b": [0, 2]}).groupby("a").mean()["b"].iloc[0])
""",
    "sympy": """
import sympy
def used():
    x = sympy.symbols("x")
    return int(sympy.integrate(2 * x, (x, 0, 1)))
""",
    "networkx": """
import networkx as nx
def used():
    return nx.shortest_path_length(nx.path_graph(4), 2, 1)
""",
    "sortedcontainers": """
from sortedcontainers import SortedDict, SortedList
def used():
    return SortedList([3, 1, 2])[0] * SortedDict({2: 0, 1: 5}).keys()[0]
""",
    "torch": """
import torch
def used():
    weights = torch.ones(64, 64, requires_grad=True)
    (weights @ torch.ones(64, 64)).sum().backward()
    return float(weights.grad[0, 0] / 64)
""",
    "sqlite3": """
import asyncio, concurrent.futures, ctypes, multiprocessing, sqlite3, ssl, subprocess, tempfile, uuid
def used():
    async def one():
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return await asyncio.get_running_loop().run_in_executor(pool, lambda: uuid.UUID(int=1).int)
    return asyncio.run(one()) * sqlite3.connect(":memory:").execute("select 1").fetchone()[0]
""",
}
# The dear ones are tried once on every run, everywhere by the whole suite.
DEAR = ("torch", "scipy", "pandas")
CPP = """
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <random>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
int main() {
    struct stat input;
    fstat(0, &input);
    const char *text = static_cast<const char *>(mmap(nullptr, input.st_size, PROT_READ, MAP_PRIVATE, 0, 0));
    if (text == MAP_FAILED) return 1;
    void *area = mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    syscall(SYS_mbind, area, 1 << 20, 0, nullptr, 0, 0);  // as OpenBLAS and libnuma do, whatever it answers
    syscall(SYS_io_uring_setup, 8, nullptr);
    cpu_set_t cores;
    sched_getaffinity(0, sizeof cores, &cores);
    std::atomic<int> sum{0};
    std::thread threads[4];
    for (auto &one : threads) one = std::thread([&] { sum += 1; });
    for (auto &one : threads) one.join();
    std::random_device noise;
    sum += std::async(std::launch::async, [&] { return noise() ? 1 : 1; }).get();
    std::printf("%d\\n", sum.load() + text[0] - '0');
}
"""


TRIED = [tier for tier in TIERS if tier != "docker"]
ON_EACH_TIER = pytest.mark.parametrize("worker", TRIED, indirect=True, scope="module")
BINARIES = ProgramJudge(max_source_bytes=64 << 10)


@pytest.fixture(scope="module")
def worker(request: pytest.FixtureRequest) -> Iterator[SandboxWorker]:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    worker = SandboxWorker(request.param, 0)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("worker", "module"),
    [
        pytest.param(tier, module, marks=[pytest.mark.slow] if module in DEAR and tier != TRIED[0] else [])
        for tier in TRIED
        for module in USES
    ],
    indirect=["worker"],
    scope="module",
)
def test_a_response_that_imports_and_uses_a_library_is_right(worker: SandboxWorker, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    code = CodeTests(style=CodeTestStyle.CODE_TEST_STYLE_MODULE, code="assert used() == 1", entry_point="used")
    test_set = verdict_pb2.TestSet(code_tests=code, limits=LIMITS)

    verdict = judge_code(worker, USES[module], test_set, 64 << 10, want_details=False)

    assert Outcome.Name(verdict.outcome) == "OUTCOME_ACCEPTED", verdict.detail


@ON_EACH_TIER
def test_a_scoring_function_may_use_libraries(worker: SandboxWorker) -> None:
    modules = [module for module in USES if module not in DEAR and importlib.util.find_spec(module)]
    sources = [USES[module].replace("def used()", f"def used_{module}()") for module in modules]
    calls = ", ".join(f"used_{module}()" for module in modules)
    source = "\n".join(sources) + f"\ndef score(response):\n    return min({calls})\n"
    function = ScoringFunction(source=source, function="score")

    (verdict,) = score_responses(
        worker, ["x"], verdict_pb2.TestSet(scoring_function=function, limits=LIMITS), JudgeOptions()
    )

    assert Outcome.Name(verdict.outcome) == "OUTCOME_ACCEPTED", verdict.detail


@ON_EACH_TIER
@pytest.mark.parametrize(
    ("language", "source"),
    [("cpp", CPP), ("pypy", "import mmap\nprint(int(mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:1]) + 5)")],
)
def test_a_program_of_another_language_may_use_what_its_runtime_does(
    worker: SandboxWorker, language: str, source: str
) -> None:
    if language not in languages():
        pytest.skip(f"{language} is not installed")
    tests = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdin=b"2\n", stdout=b"7\n")])

    verdict = BINARIES.judge(worker, source, language, tests)

    assert Outcome.Name(verdict.outcome) == "OUTCOME_ACCEPTED", verdict.detail
