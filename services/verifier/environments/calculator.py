"""Environment `calculator`: what stands between <calculator> and </calculator> is computed; without it, it is over."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from services.verifier.environments.calls import tagged_call
from services.verifier.environments.environment import Reply, Setup, State

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
        return _written(value)
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


def _written(value: _Number) -> str:
    text = repr(value)
    if isinstance(value, int) and len(text) > MOST_DIGITS:
        raise ValueError(f"the result has more than {MOST_DIGITS} digits")
    return text
