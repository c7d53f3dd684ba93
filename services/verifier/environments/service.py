"""gRPC service of the environments: those of the box, those in other processes and those of installed packages, one
observation per seed or turn.

Environment `python`: the last Python block of an action runs in the judge's sandbox, and its output is the answer.
An action without one ends the episode; the judge decides about it. Each run begins anew: nothing of a run before it
is left, so a call brings what it needs.

Environment `retry_with_errors`: a program is run on the public tests, what fails is shown, and it is written again.
Hidden tests are not run here at all, so nothing of them is ever shown; the judge decides about the last attempt.

Environment `text_game`: a number is to be guessed, and each guess is called too low or too high.
It decides its episodes itself: won, or lost, with the guesses that were needed.

Nothing is kept between calls. An episode's state is signed and goes back with each observation, so that any replica
takes its next turn.

What an environment is: two functions of values, nothing kept between their calls, and the sealed state of an
episode between them.
"""

from __future__ import annotations

import ast
import base64
import hmac
import json
import math
import operator
import random
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import grpc
from blake3 import blake3

from services.verifier.settings import Settings
from spo import redis_keys
from spo.errors import FieldViolation, InternalError, InvalidInput, NotFound, NotReady, SpoError
from spo.messaging.redis_client import RedisClient
from spo.observability import get_logger
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS, RpcClient
from spo.spec.reward import score_in_range
from spo.spec.tasks import setup_from_json
from spo.tasks.problem import extract_program
from spo.v1 import environment_service_pb2 as wire, verdict_pb2
from spo.v1.environment_service_pb2 import BeginRequest, BeginResponse, Observation, StepRequest, StepResponse, Turn
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceServicer, EnvironmentServiceStub
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub

# JSON values: an episode's state travels with it.
State = dict[str, Any]

MOST_STATE_BYTES = 64 << 10
# Of one that travels within another, in base 64.
MOST_INNER_STATE_BYTES = 47 << 10
_KEY_BYTES = _SEAL_BYTES = 32
# KEYS: the shared key.  ARGV: a new one, for where there is none.  Returns the one that holds.
_FIRST_WINS = """#!lua flags=allow-oom
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
"""


@dataclass(frozen=True)
class Said:
    """What a live episode says: text for the policy, or its end with what the whole of it earned (any number)."""

    text: str = ""
    done: bool = False
    reward: float = 0.0


@dataclass(frozen=True)
class Setup:
    """How an environment is set up for one problem. `seconds`: how long this call may take yet."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 30.0

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """An argument that is a whole number in a range. Raises InvalidInput."""
        value = self.arguments.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise bad_argument(name, f"must be a whole number from {low} to {high}")
        return value

    def text(self, name: str, default: str, choices: tuple[str, ...] = ()) -> str:
        """An argument that is text, one of the choices where there are any. Raises InvalidInput."""
        value = self.arguments.get(name, default)
        if not isinstance(value, str) or (choices and value not in choices):
            raise bad_argument(name, f"must be one of {', '.join(choices)}" if choices else "must be text")
        return value

    def only(self, *names: str) -> None:
        """Raises InvalidInput where there is an argument of another name."""
        for name in self.arguments:
            if name not in names:
                raise bad_argument(name, f"there is no such argument; there are: {', '.join(names)}")


@dataclass(frozen=True)
class Reply:
    """What an environment says to the policy, and what it knows of the episode from now on.

    score: of the turn just taken, between 0 and 1. verdict: of the whole episode, by environments that decide it
    themselves, and then at every turn: it is what the episode is worth where it is cut here.
    """

    text: str = ""
    state: State = field(default_factory=dict)
    done: bool = False
    score: float | None = None
    verdict: verdict_pb2.Verdict | None = None
    label: str = ""


class Environment(Protocol):
    """Answers the policy's turns. All that it knows of an episode is in the state, so any replica goes on."""

    def begin(self, setup: Setup, seed: int) -> Reply:
        """What follows the problem's statement; `seed` decides what is random. Raises InvalidInput."""

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """What follows when the policy writes `action`; the same for the same values where it can be."""


def bad_argument(name: str, message: str) -> InvalidInput:
    """An argument of the job's that the environment does not take."""
    violation = FieldViolation(f"/arguments/{name}", message)
    return InvalidInput(f"{name} {message}", code="bad_environment", violations=(violation,))


class Seal(Protocol):
    """How states travel."""

    def seal(self, episode: str, state: State) -> bytes:
        """The bytes of a state."""

    def open(self, episode: str, sealed: bytes) -> State:
        """The inverse of `seal`. Raises InvalidInput."""


class OpenState:
    """States as they are, for servers of environments that only the verifiers ask: those sign what passes on."""

    def seal(self, episode: str, state: State) -> bytes:
        """The state as JSON. Raises InternalError (code "environment_broken") on what is none, or too much of it."""
        return _state_written(state, MOST_INNER_STATE_BYTES)

    def open(self, episode: str, sealed: bytes) -> State:
        """The inverse of `seal`. Raises InvalidInput (code "bad_environment_state")."""
        try:
            state: State = json.loads(sealed)
        except ValueError:
            raise InvalidInput("the episode's state is no JSON", code="bad_environment_state") from None
        return state


class StateSeal:
    """Signs states with a key that all replicas share: the first one has made it, and it is in Redis alone."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._key = self._shared_key()

    def seal(self, episode: str, state: State) -> bytes:
        """The signed bytes of a state; `episode` names the environment and its setup, and is signed with it.

        Raises InternalError (code "environment_broken") on a state that is no JSON or larger than MOST_STATE_BYTES.
        """
        written = _state_written(state, MOST_STATE_BYTES)
        return self._signature(episode, written) + written

    def open(self, episode: str, sealed: bytes) -> State:
        """The inverse of `seal`. Raises InvalidInput (code "bad_environment_state") on what no replica has signed."""
        signature, written = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(signature, self._signature(episode, written)):
            # Another key, where Redis has lost the first one.
            self._key = self._shared_key()
            if not hmac.compare_digest(signature, self._signature(episode, written)):
                message = "the episode's state is none that an environment of this platform has given out"
                raise InvalidInput(message, code="bad_environment_state")
        state: State = json.loads(written)
        return state

    def _signature(self, episode: str, written: bytes) -> bytes:
        named = episode.encode()
        return blake3(len(named).to_bytes(8, "little") + named + written, key=self._key).digest()

    def _shared_key(self) -> bytes:
        found = self._client.eval(_FIRST_WINS, 1, redis_keys.environment_key(), secrets.token_bytes(_KEY_BYTES))
        assert isinstance(found, bytes)
        return found


def _state_written(state: State, most_bytes: int) -> bytes:
    try:
        written = json.dumps(state, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InternalError(f"the episode's state is no JSON: {error}", code="environment_broken") from None
    if len(written) > most_bytes:
        message = f"the episode's state has {len(written)} bytes; at most {most_bytes} may travel"
        raise InternalError(message, code="environment_broken")
    return written


_FENCE = "```"

# What a program printed is no failure, whatever was expected of it.
_RAN = (verdict_pb2.OUTCOME_ACCEPTED, verdict_pb2.OUTCOME_WRONG_ANSWER)
MARGIN_SECONDS = 1.0

TAG = "calculator"
MOST_CHARACTERS = 500
# Of a number, in bits: what is larger is not computed.
MOST_BITS = 4096
MOST_DIGITS = 50

_Number = int | float
_OPERATORS: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., _Number]] = {
    **{"abs": abs, "min": min, "max": max, "round": round, "sqrt": math.sqrt, "exp": math.exp, "log": math.log},
    **{"sin": math.sin, "cos": math.cos, "tan": math.tan, "gcd": math.gcd, "lcm": math.lcm, "floor": math.floor},
    **{"ceil": math.ceil},
}
_CONSTANTS = {"pi": math.pi, "e": math.e}

TOOL = "python"
MOST_OUTPUT_BYTES = 16 << 10

ATTEMPTS = 3
MESSAGE = "The program is wrong. {detail}\nWrite the whole program again."

# The judge of these episodes, for everybody who compares verdicts.
DECIDED_BY = "text_game/1"
_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)

_SHOWN = 500

log = get_logger("environments")

# Packages name their environments in it: the entry point is a class, which is made without arguments.
ENTRY_POINTS = "spo.environments"

MOST_EPISODES = 4096
MOST_ACTION_CHARACTERS = 1 << 20
MOST_TEXT_CHARACTERS = 1 << 20
# Turns of one request that are taken side by side.
TURNS_AT_ONCE = 16

_Asked = TypeVar("_Asked")


def tagged_call(action: str, tag: str) -> str | None:
    """What the last <tag> of an action holds, up to </tag> or the action's end; None: there is none."""
    _, opened, inside = action.rpartition(f"<{tag}>")
    return inside.partition(f"</{tag}>")[0] if opened else None


def fenced_call(action: str, languages: tuple[str, ...]) -> str | None:
    """The last fenced block that names one of these languages; None: there is none."""
    found = None
    for inside in action.split(_FENCE)[1::2]:
        label, newline, body = inside.partition("\n")
        if newline and label.strip().lower() in languages:
            found = body
    return found


@dataclass(frozen=True)
class Sandbox:
    """The judge, as environments use it."""

    judge: RpcClient

    def verdict(
        self, program: str, language: str, tests_digest: str, seconds: float, output_bytes: int = 0
    ) -> verdict_pb2.Verdict:
        """The verdict with each test's result up to the first failure.

        Raises NotReady when the judge could not decide, and what the judge raises.
        """
        request = JudgeRequest(
            raw_programs=[program.encode(errors="replace")],
            language=language,
            tests_digest=tests_digest,
            priority=PRIORITY_TRAINING,
            want_details=True,
            stop_early=True,
            output_bytes=output_bytes,
        )
        response: JudgeResponse = self.judge.call("Judge", request, max(MARGIN_SECONDS, seconds - MARGIN_SECONDS))
        if response.verdicts[0].outcome == verdict_pb2.OUTCOME_INTERNAL_ERROR:
            raise NotReady("the judge could not run a program", code="judge_fault")
        return response.verdicts[0]

    def output(self, program: str, limits: verdict_pb2.TestSet, seconds: float, output_bytes: int) -> str:
        """What a Python program prints when it is given no input, or how it failed; `limits`: one test without output.

        Raises as `verdict`.
        """
        digest = blake3(limits.SerializeToString(deterministic=True)).hexdigest()
        try:
            verdict = self.verdict(program, "python", digest, seconds, output_bytes)
        except NotFound:
            self.judge.call("UploadTests", UploadTestsRequest(test_sets=[limits]))
            verdict = self.verdict(program, "python", digest, seconds, output_bytes)
        (run,) = verdict.tests
        if verdict.outcome in _RAN:
            return run.output
        failure = run.detail if run.outcome == verdict.outcome else verdict.detail
        return f"{run.output}{failure}" if not run.output or run.output.endswith("\n") else f"{run.output}\n{failure}"


class Calculator:
    """Arithmetic on request; the judge decides about the last action, which asks for none."""

    def begin(self, setup: Setup, seed: int) -> Reply:
        """Nothing to say before the first call."""
        setup.only()
        return Reply()

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """The result of the last call, or what is wrong with it."""
        expression = tagged_call(action, TAG)
        if expression is None:
            return Reply(done=True)
        return Reply(computed(expression), label=TAG)


def computed(expression: str) -> str:
    """The value of an arithmetic expression as text, or "error: ..." where it has none within the bounds."""
    try:
        if len(expression) > MOST_CHARACTERS:
            raise ValueError(f"an expression has at most {MOST_CHARACTERS} characters")
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
        return _number_written(value)
    except (SyntaxError, RecursionError, MemoryError):
        return "error: this is no arithmetic expression"
    except (ValueError, TypeError, ArithmeticError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _applied(op, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
        case _:
            raise ValueError("only numbers, + - * / // % ** and " + " ".join(sorted(_FUNCTIONS)))


def _applied(op: ast.operator, left: _Number, right: _Number) -> _Number:
    if isinstance(op, ast.Pow) and isinstance(left, int) and abs(left) > 1 and right * math.log2(abs(left)) > MOST_BITS:
        raise ValueError(f"the result has more than {MOST_BITS} bits")
    result = _OPERATORS[type(op)](left, right)
    if isinstance(result, complex):
        raise ValueError("the result is no real number")
    return _bounded(result)


def _bounded(value: _Number) -> _Number:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"a number has at most {MOST_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is not finite")
    return value


def _number_written(value: _Number) -> str:
    text = repr(value)
    if isinstance(value, int) and len(text) > MOST_DIGITS:
        raise ValueError(f"the result has more than {MOST_DIGITS} digits")
    return text


class PythonTool:
    """Runs Python on request. Arguments: calls ("fenced": ```python blocks, "tag": <python>), seconds, output_bytes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def begin(self, setup: Setup, seed: int) -> Reply:
        """Nothing to say before the first call."""
        _limits(setup)
        return Reply()

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """What the last call prints, or how it failed."""
        is_tag = setup.text("calls", "fenced", ("fenced", "tag")) == "tag"
        program = tagged_call(action, TOOL) if is_tag else fenced_call(action, ("python", "py", "python3"))
        if program is None:
            return Reply(done=True)
        most = setup.number("output_bytes", 4096, 1, MOST_OUTPUT_BYTES)
        printed = self._sandbox.output(program, _limits(setup), setup.seconds, most)
        return Reply(printed or "(no output)", label=TOOL)


def _limits(setup: Setup) -> verdict_pb2.TestSet:
    setup.only("calls", "seconds", "output_bytes")
    seconds = setup.number("seconds", 5, 1, 20)
    limits = verdict_pb2.Limits(cpu_seconds=seconds, wall_seconds=2 * seconds)
    return verdict_pb2.TestSet(
        tests=[verdict_pb2.TestCase(public=True)], checker=verdict_pb2.CHECKER_TOKENS, limits=limits
    )


class RetryWithErrors:
    """Up to `attempts` programs for one problem; `message` says what is wrong with one, {detail} being the judge's."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def begin(self, setup: Setup, seed: int) -> Reply:
        """The statement says all."""
        setup.only("attempts", "message")
        setup.number("attempts", ATTEMPTS, 1, 100)
        setup.text("message", MESSAGE)
        _public_tests(setup)
        return Reply(state={"attempts": 0})

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """What is wrong with the program; the end when the public tests pass or there is no further attempt."""
        language = str(setup.problem.get("language", "python"))
        program = extract_program(action, str(setup.problem.get("response_format", "raw")), language)
        verdict = self._sandbox.verdict(program, language, _public_tests(setup), setup.seconds)
        attempts = int(state["attempts"]) + 1
        passed = verdict.public_tests_passed / max(1, verdict.public_tests_total)
        label = "passes the public tests" if verdict.outcome == verdict_pb2.OUTCOME_ACCEPTED else "fails a public test"
        if verdict.outcome == verdict_pb2.OUTCOME_ACCEPTED or attempts >= setup.number("attempts", ATTEMPTS, 1, 100):
            return Reply(done=True, score=passed, label=label)
        text = setup.text("message", MESSAGE).replace("{detail}", verdict.detail)
        return Reply(text, {"attempts": attempts}, score=passed, label=label)


def _public_tests(setup: Setup) -> str:
    digest = setup.problem.get("public_tests_digest")
    if not isinstance(digest, str) or not digest:
        raise InvalidInput("the problem has no public tests whose outcome could be shown", code="no_public_tests")
    return digest


# What is said, where a job has words of its own for it.
_TEXTS = ("rules", "higher", "lower", "no_number")


class TextGame:
    """Guess a number between `low` and `high` in at most `guesses` actions, whose last number is the guess."""

    def begin(self, setup: Setup, seed: int) -> Reply:
        """The rules; the number is the problem's, where its arguments have one, or else decided by the seed."""
        low, high, guesses = _rules(setup)
        number = setup.problem.get("arguments", {}).get("number", random.Random(seed).randint(low, high))
        if type(number) is not int:
            raise bad_argument("number", "must be a whole number")
        rules = setup.text("rules", f"Guess a whole number from {low} to {high}. You have {guesses} guesses.")
        return Reply(rules, {"number": number, "used": 0}, verdict=_lost("no guess was right"))

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """Whether the number is higher or lower, or the end."""
        _, _, guesses = _rules(setup)
        number, used = int(state["number"]), int(state["used"]) + 1
        found = _NUMBER.findall(action)
        if found and int(found[-1]) == number:
            won = verdict_pb2.Verdict(
                outcome=verdict_pb2.OUTCOME_ACCEPTED,
                judge_version=DECIDED_BY,
                detail=f"guessed with guess {used}",
                runs=1,
            )
            return Reply(done=True, score=1.0, verdict=won, label="guess")
        verdict = _lost("no guess was right")
        if used >= guesses:
            return Reply(done=True, score=0.0, verdict=verdict, label="guess")
        name, answer = ("no_number", "That is no number.") if not found else ("higher", "Higher.")
        if found and int(found[-1]) > number:
            name, answer = "lower", "Lower."
        left = guesses - used
        text = setup.text(name, f"{answer} {left} {'guess is' if left == 1 else 'guesses are'} left.")
        return Reply(text, {"number": number, "used": used}, score=0.0, verdict=verdict, label="guess")


def _rules(setup: Setup) -> tuple[int, int, int]:
    setup.only("low", "high", "guesses", *_TEXTS)
    for name in _TEXTS:
        setup.text(name, "")
    low = setup.number("low", 1, -(10**9), 10**9)
    high = setup.number("high", 100, -(10**9), 10**9)
    if low > high:
        raise bad_argument("high", "must be at least low")
    return low, high, setup.number("guesses", 7, 1, 100)


def _lost(detail: str) -> verdict_pb2.Verdict:
    return verdict_pb2.Verdict(
        outcome=verdict_pb2.OUTCOME_WRONG_ANSWER, judge_version=DECIDED_BY, detail=detail, runs=1
    )


class RemoteEnvironment:
    """One environment of a server that the operator has named; its state travels inside ours, which is signed."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._client = RpcClient(f"environment {name}", address, EnvironmentServiceStub, is_ours=False)

    def begin(self, setup: Setup, seed: int) -> Reply:
        """The first observation. Raises what the server raises, Unreachable while it is away."""
        request = BeginRequest(environment=self.name, environment_json=_written(setup), seeds=[seed])
        found: BeginResponse = self._client.call("Begin", request, _deadline(setup))
        return self._reply(list(found.observations))

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """What follows on an action. Raises as `begin`."""
        turn = Turn(state=base64.b64decode(state["remote"]), action=action)
        request = StepRequest(environment=self.name, environment_json=_written(setup), turns=[turn])
        found: StepResponse = self._client.call("Step", request, _deadline(setup))
        return self._reply(list(found.observations))

    def _reply(self, found: list[Observation]) -> Reply:
        if len(found) != 1:
            raise self._broken(f"gave {len(found)} observations for one episode")
        (said,) = found
        return Reply(
            text=said.text,
            state={} if said.done else {"remote": base64.b64encode(said.state).decode()},
            done=said.done,
            score=said.score if said.HasField("score") else None,
            verdict=self._checked(said.verdict) if said.HasField("verdict") else None,
            label=said.label,
        )

    def _checked(self, verdict: verdict_pb2.Verdict) -> verdict_pb2.Verdict:
        """Only what a verdict on an episode may say."""
        if verdict.outcome not in (verdict_pb2.OUTCOME_ACCEPTED, verdict_pb2.OUTCOME_WRONG_ANSWER):
            raise self._broken(f"gave a verdict with the outcome {verdict.outcome}")
        checked = verdict_pb2.Verdict(outcome=verdict.outcome, detail=verdict.detail[:_SHOWN], runs=1)
        checked.judge_version = verdict.judge_version[:100] or self.name
        if verdict.HasField("score"):
            score = score_in_range(verdict.score)
            if score is None:
                raise self._broken(f"gave a score of {verdict.score}, which is not between 0 and 1")
            checked.score = score
        return checked

    def _broken(self, what: str) -> InternalError:
        return InternalError(f"environment {self.name} {what}", code="environment_broken")


def _written(setup: Setup) -> str:
    document = asdict(setup)
    del document["seconds"]
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _deadline(setup: Setup) -> float:
    return max(MARGIN_SECONDS, setup.seconds - MARGIN_SECONDS)


class Environments:
    """Environments by name."""

    def __init__(self, known: dict[str, Environment]) -> None:
        self._known = known

    @property
    def names(self) -> list[str]:
        """Their names, sorted."""
        return sorted(self._known)

    def of(self, name: str) -> Environment:
        """The environment of a name. Raises NotFound (code "environment_not_found")."""
        if name not in self._known:
            message = f"there is no environment {name!r}; there are: {', '.join(self.names)}"
            raise NotFound(message, code="environment_not_found")
        return self._known[name]


def all_environments(judge: RpcClient, servers: Mapping[str, str] = MappingProxyType({})) -> Environments:
    """Those of the box, whose programs `judge` runs, of other servers by name, and of installed packages.

    A package's that fails is left out. Names of the box are taken.
    """
    sandbox = Sandbox(judge)
    known: dict[str, Environment] = {
        "calculator": Calculator(),
        "python": PythonTool(sandbox),
        "retry_with_errors": RetryWithErrors(sandbox),
        "text_game": TextGame(),
    }
    for name, address in servers.items():
        known.setdefault(name, RemoteEnvironment(name, address))
    for found in entry_points(group=ENTRY_POINTS):
        try:
            known.setdefault(found.name, found.load()())
        # Whatever a package raises; the others are served.
        except Exception as error:
            log.exception("an environment cannot be loaded", environment=found.name, reason=str(error))
    return Environments(known)


class EnvironmentService(EnvironmentServiceServicer):
    """The environments, for samplers."""

    def __init__(self, environments: Environments, seal: Seal) -> None:
        self._environments = environments
        self._seal = seal
        self._pool = ThreadPoolExecutor(TURNS_AT_ONCE, thread_name_prefix="turns")

    def Begin(self, request: wire.BeginRequest, context: grpc.ServicerContext) -> wire.BeginResponse:
        """The first observation of each episode."""
        environment, setup = self._environments.of(request.environment), _setup(request.environment_json, context)
        _require_few(len(request.seeds), "/seeds")
        episode = f"{request.environment} {request.environment_json}"
        answers = self._asked(request.environment, lambda seed: environment.begin(setup, seed), request.seeds, context)
        return wire.BeginResponse(observations=[self._observation(episode, answer) for answer in answers])

    def Step(self, request: wire.StepRequest, context: grpc.ServicerContext) -> wire.StepResponse:
        """What follows on each turn."""
        environment, setup = self._environments.of(request.environment), _setup(request.environment_json, context)
        _require_few(len(request.turns), "/turns")
        episode = f"{request.environment} {request.environment_json}"
        states = [self._seal.open(episode, turn.state) for turn in request.turns]
        if any(len(turn.action) > MOST_ACTION_CHARACTERS for turn in request.turns):
            raise _fault("/turns", f"an action has at most {MOST_ACTION_CHARACTERS} characters")
        answers = self._asked(
            request.environment,
            lambda each: environment.step(setup, each[0], each[1].action),
            list(zip(states, request.turns, strict=True)),
            context,
        )
        return wire.StepResponse(observations=[self._observation(episode, answer) for answer in answers])

    def DescribeEnvironments(
        self, request: wire.DescribeEnvironmentsRequest, context: grpc.ServicerContext
    ) -> wire.DescribeEnvironmentsResponse:
        """The names of all environments."""
        return wire.DescribeEnvironmentsResponse(environments=self._environments.names)

    def _asked(
        self, name: str, ask: Callable[[_Asked], Reply], episodes: Iterable[_Asked], context: grpc.ServicerContext
    ) -> list[Reply]:
        """The answers, in order; what an environment raises that is no SpoError is its own fault, and names it."""

        def ask_for_somebody(episode: _Asked) -> Reply:
            # Who has gone asks again: done for nobody as well, a slow environment would never catch up.
            if not context.is_active():
                raise NotReady(f"nobody waits any more for environment {name}")
            return ask(episode)

        try:
            return list(self._pool.map(ask_for_somebody, episodes))
        except SpoError:
            raise
        except Exception as error:
            log.exception("an environment failed", environment=name)
            message = f"environment {name} failed: {type(error).__name__}: {error}"[:500]
            raise InternalError(message, code="environment_broken") from error

    def _observation(self, episode: str, answer: Reply) -> wire.Observation:
        if len(answer.text) > MOST_TEXT_CHARACTERS:
            message = f"an observation has {len(answer.text)} characters; at most {MOST_TEXT_CHARACTERS} may travel"
            raise InternalError(message, code="environment_broken")
        score = None if answer.score is None else score_in_range(answer.score)
        if answer.score is not None and score is None:
            message = f"a turn's score is {answer.score}, and not between 0 and 1"
            raise InternalError(message, code="environment_broken")
        state = b"" if answer.done else self._seal.seal(episode, answer.state)
        return wire.Observation(
            text=answer.text,
            state=state,
            done=answer.done,
            score=score,
            verdict=answer.verdict,
            label=answer.label[:100],
        )


def environment_service(client: RedisClient, settings: Settings) -> EnvironmentService:
    """The service of a pool's process: all environments, their programs run by the judge of the settings."""
    judge = RpcClient("sandbox-judge", settings.sandbox_judge_address, JudgeServiceStub)
    return EnvironmentService(all_environments(judge, settings.environment_servers), StateSeal(client))


def _setup(text: str, context: grpc.ServicerContext) -> Setup:
    given = setup_from_json(text)
    remaining = context.time_remaining()
    return Setup(given.arguments, given.problem, DEFAULT_DEADLINE_SECONDS if remaining is None else remaining)


def _require_few(episodes: int, pointer: str) -> None:
    if episodes > MOST_EPISODES:
        raise _fault(pointer, f"must be at most {MOST_EPISODES}")


def _fault(pointer: str, message: str) -> InvalidInput:
    violation = FieldViolation(pointer, message)
    return InvalidInput("this environment cannot be asked so", code="bad_environment", violations=(violation,))
