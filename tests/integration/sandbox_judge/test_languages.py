"""Compiled languages and special judges, in the strongest and the weakest tier that work here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from services.sandbox_judge.executor import JudgeFault, languages
from services.sandbox_judge.isolation import TIERS
from services.sandbox_judge.probe import why_not
from services.sandbox_judge.program_judge import JudgeOptions, ProgramJudge
from services.sandbox_judge.sandbox_worker import SandboxWorker
from spo.v1 import verdict_pb2
from spo.v1.verdict_pb2 import Checker, Limits, Outcome

DOUBLES = verdict_pb2.TestSet(
    tests=[verdict_pb2.TestCase(stdin=b"%d\n" % n, stdout=b"%d\n" % (2 * n)) for n in range(3)],
    limits=Limits(cpu_seconds=0.5, wall_seconds=1, memory_bytes=64 << 20),
)


@pytest.fixture(scope="module", params=(TIERS[0], TIERS[-1]))
def worker(request: pytest.FixtureRequest) -> Iterator[SandboxWorker]:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    worker = SandboxWorker(request.param, 0)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def program_judge(worker: SandboxWorker) -> ProgramJudge:
    """One per tier, so that each builds its own binaries."""
    return ProgramJudge(max_source_bytes=64 << 10)


def outcome(
    program_judge: ProgramJudge,
    worker: SandboxWorker,
    program: str,
    language: str,
    tests: verdict_pb2.TestSet = DOUBLES,
) -> str:
    verdict = program_judge.judge(worker, program, language, tests)
    return Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower()


CPP = {
    "accepted": "#include <iostream>\nint main(){long n; std::cin>>n; std::cout<<2*n;}",
    "wrong_answer": "#include <iostream>\nint main(){long n; std::cin>>n; std::cout<<3*n+1;}",
    "compile_error": "int main(){return missing;}",
    "cpu_time_limit": "int main(){volatile long x=0; for(;;) x++;}",
    "wall_time_limit": "#include <unistd.h>\nint main(){pause();}",
    "memory_limit": "#include <vector>\nint main(){std::vector<char> v(1l<<30, 1); return v[5];}",
    "output_limit": '#include <cstdio>\nint main(){for(;;) puts("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");}',
    "runtime_error": "int main(){int *p=nullptr; *p=1;}",
    "security_violation": "#include <sys/ptrace.h>\nint main(){ptrace(PTRACE_TRACEME,0,0,0);}",
}


@pytest.mark.skipif("cpp" not in languages(), reason="no C++ compiler")
@pytest.mark.parametrize("expected", CPP)
def test_a_cpp_program_gets_its_verdict(program_judge: ProgramJudge, worker: SandboxWorker, expected: str) -> None:
    assert outcome(program_judge, worker, CPP[expected], "cpp") == expected


@pytest.mark.skipif("c" not in languages(), reason="no C compiler")
def test_a_c_program_is_built_once_and_judged_again_from_the_kept_binary(
    program_judge: ProgramJudge, worker: SandboxWorker
) -> None:
    source = '#include <stdio.h>\nint main(void){int n; scanf("%d",&n); printf("%d",2*n);}'
    assert outcome(program_judge, worker, source, "c") == "accepted"
    worker.close()  # a compiler that cannot run again proves that the binary was kept
    verdict = program_judge.judge(worker, source, "c", DOUBLES, JudgeOptions(want_details=True))
    assert verdict.tests_passed == 3


HOSTILE_CPP = {
    "fork": (
        "#include <unistd.h>\nint main(){ if (fork() < 0) return 7; for(;;); }",
        "runtime_error",
    ),
    "shell": ('#include <cstdlib>\nint main(){ return system("echo 42") ? 7 : 0; }', "runtime_error"),
    "read a file": ('#include <cstdio>\nint main(){ return fopen("/etc/passwd", "r") ? 0 : 7; }', "runtime_error"),
    "socket": ("#include <sys/socket.h>\nint main(){ return socket(2, 1, 0) < 0 ? 7 : 0; }", "runtime_error"),
    "descriptors": (
        "#include <fcntl.h>\nint main(){ int n=0; for(int i=3;i<999;i++) n += fcntl(i,F_GETFD)>=0; return n ? 0:7; }",
        "runtime_error",
    ),
    "include a secret": ('#include "/etc/shadow"\nint main(){}', "compile_error"),
    "template bomb": (
        "template<int n> struct A { A<n-1> a; A<n-2> b; };\ntemplate<> struct A<0> {}; template<> struct A<1> {};\n"
        "template<long n> long f() { return f<n+1>() + f<n+2>(); }\nint main(){ return f<0>(); }",
        "compile_error",
    ),
    "giant array": ("char a[1ll<<40] = {1};\nint main(){ return a[1]; }", "compile_error"),
    "assembler include": ('asm(".incbin \\"/etc/shadow\\"");\nint main(){}', "compile_error"),
}


@pytest.mark.skipif("cpp" not in languages(), reason="no C++ compiler")
@pytest.mark.parametrize("name", HOSTILE_CPP)
def test_a_hostile_cpp_program_meets_its_end(program_judge: ProgramJudge, worker: SandboxWorker, name: str) -> None:
    source, expected = HOSTILE_CPP[name]
    descriptors = len(os.listdir("/proc/self/fd"))

    assert outcome(program_judge, worker, source, "cpp") == expected
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4  # those of a zygote that may have been started


JAVA_PROGRAM = """
import java.util.*;
public class Solution {
    public static void main(String[] arguments) throws Exception {
        int n = new Scanner(System.in).nextInt();
        BODY
        System.out.println(2 * n);
    }
}
"""
JAVA = {
    "accepted": "Thread other = new Thread(() -> {}); other.start(); other.join();",
    "compile_error": "int x = ;",
    "cpu_time_limit": "while (n < 100) n = (n & 7) + 1;",
    "memory_limit": "n += new int[1 << 28].length;",
    "runtime_error": 'new ProcessBuilder("/bin/true").start();',
}


@pytest.mark.skipif("java" not in languages(), reason="NO JAVA HERE: javac is not installed")
@pytest.mark.parametrize("expected", JAVA)
def test_a_java_program_gets_every_kind_of_verdict(
    program_judge: ProgramJudge, worker: SandboxWorker, expected: str
) -> None:
    if worker.tier != TIERS[0] and expected != "accepted":
        pytest.skip("one outcome shows that Java runs in this tier")
    tests = verdict_pb2.TestSet(tests=DOUBLES.tests[:1], limits=Limits(cpu_seconds=2, memory_bytes=256 << 20))

    assert outcome(program_judge, worker, JAVA_PROGRAM.replace("BODY", JAVA[expected]), "java", tests) == expected


@pytest.mark.skipif("pypy" not in languages(), reason="NO PYPY HERE: pypy3 is not installed")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(2 * int(input()))", "accepted"),
        ("print(", "compile_error"),
        ("import os; os.fork()", "runtime_error"),
        ("while True: pass", "cpu_time_limit"),
    ],
)
def test_a_pypy_program_gets_its_verdict(
    program_judge: ProgramJudge, worker: SandboxWorker, program: str, expected: str
) -> None:
    assert outcome(program_judge, worker, program, "pypy") == expected


DIVISOR_CHECKER = b"""
import sys
problem, output, answer = (open(path).read() for path in sys.argv[1:4])
n, divisor = int(problem), int(output)
if 1 < divisor < n and n % divisor == 0:
    sys.exit(0)
print("not a divisor", file=sys.stderr)
sys.exit(1)
"""


def divisor_tests(checker: bytes = DIVISOR_CHECKER, language: str = "") -> verdict_pb2.TestSet:
    return verdict_pb2.TestSet(
        tests=[verdict_pb2.TestCase(stdin=b"91\n", stdout=b"7\n"), verdict_pb2.TestCase(stdin=b"15\n", stdout=b"3\n")],
        checker=Checker.CHECKER_SPECIAL,
        checker_program=checker,
        checker_language=language,
    )


def test_a_special_judge_accepts_any_right_answer(program_judge: ProgramJudge, worker: SandboxWorker) -> None:
    other = "n = int(input())\nprint(max(d for d in range(2, n) if n % d == 0))"

    assert outcome(program_judge, worker, other, "python", divisor_tests()) == "accepted"
    assert outcome(program_judge, worker, "print(2)", "python", divisor_tests()) == "wrong_answer"
    assert outcome(program_judge, worker, "print('nonsense')", "python", divisor_tests()) == "wrong_answer"


@pytest.mark.skipif("cpp" not in languages(), reason="no C++ compiler")
def test_a_special_judge_may_be_a_cpp_program(program_judge: ProgramJudge, worker: SandboxWorker) -> None:
    checker = b"""
    #include <fstream>
    int main(int argc, char **argv) {
        long n, divisor = 0;
        std::ifstream(argv[1]) >> n;
        std::ifstream(argv[2]) >> divisor;
        return divisor > 1 && divisor < n && n % divisor == 0 ? 0 : 1;
    }
    """
    assert outcome(
        program_judge, worker, "print(13 if input() == '91' else 5)", "python", divisor_tests(checker, "cpp")
    ) == ("accepted")


@pytest.mark.parametrize("checker", [b"import sys; sys.exit(3)", b"import os; os.abort()", b"print("])
def test_a_broken_special_judge_is_a_fault_and_never_a_verdict(
    program_judge: ProgramJudge, worker: SandboxWorker, checker: bytes
) -> None:
    with pytest.raises(JudgeFault, match="special judge"):
        program_judge.judge(worker, "print(7)", "python", divisor_tests(checker))


def test_integers_of_any_length_are_read_and_printed(program_judge: ProgramJudge, worker: SandboxWorker) -> None:
    case = verdict_pb2.TestCase(stdin=b"5000\n", stdout=b"1" + b"0" * 5000 + b"\n")
    tests = verdict_pb2.TestSet(tests=[case], limits=DOUBLES.limits)
    for program in ("print(10 ** int(input()))", "print(int('1' + '0' * int(input())))"):
        assert outcome(program_judge, worker, program, "python", tests) == "accepted"
