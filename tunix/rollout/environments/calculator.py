"""Problems with a calculator: `<calc>3*4</calc>` is answered with `<result>12</result>`, within one completion.

A turn without a call ends the episode, and the last number of that turn is the answer: what the calculator wrote, and
earlier turns, are not read.
"""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar

import numpy as np

from tunix.errors import UserError
from tunix.rollout.environments.base import Observation, Row, Step
from tunix.rollout.environments.problem import Problem
from tunix.rollout.rewards.answers import number

OPEN, CLOSE = "<calc>", "</calc>"
DIGITS = 40
"""Digits of a numerator or denominator at most: a model that writes 9**9**9 reads `error: too large`."""

Operation = Callable[[Fraction, Fraction], Fraction]
OPERATIONS: dict[type[ast.operator], Operation] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class Calculator(Problem):
    """A problem with an `answer`, several calls of a calculator, and 1 for the right number at the end, else 0."""

    scores: ClassVar[bool] = True
    stop_strings: ClassVar[tuple[str, ...]] = (CLOSE,)

    def __init__(
        self, calls: int = 4, template: str | None = None, chat: bool = False, system: str | None = None
    ) -> None:
        """Sets the limit of calls, and how a row becomes a prompt.

        Args:
            calls: calls of the calculator at most; one more ends the episode with 0.
            template: see `Problem`; it or `system` has to explain the call to the model.
            chat: see `Problem`.
            system: see `Problem`.
        """
        if calls < 0:
            raise UserError(f"the environment calculator has calls: {calls}; it is 0 or more")
        super().__init__(template, chat, system)
        self._left = calls

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """The row's prompt; its `answer` is remembered until the end."""
        if row.get("answer") is None:
            raise UserError(f"the environment calculator wants rows with an 'answer'; there are {', '.join(row)}")
        self._answer = row["answer"]
        return super().reset(row, rng)

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """The result of a call, or the reward of the answer."""
        _, opened, asked = action.removesuffix(CLOSE).rpartition(OPEN)
        if not (opened and action.endswith(CLOSE)):
            return Step(reward=number(action, self._answer), done=True)
        if self._left == 0:
            return Step(reward=0.0, done=True)
        self._left -= 1
        return Step(f"<result>{calculate(asked)}</result>")


def calculate(text: str) -> str:
    """The value of an arithmetic expression (+ - * / // % ** and parentheses) in exact fractions, or what is wrong.

    Whole numbers are written as such, others with up to six decimal places: `1/3` gives `0.333333`.
    """
    try:
        value = _value(ast.parse(text.strip().replace(",", ""), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: too large"
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two are the parser's, of deep nesting
        return "error: not an arithmetic expression"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0")


def _value(node: ast.expr) -> Fraction:
    """The value of a checked node; a ValueError for anything but numbers and arithmetic."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):  # a whole power, whose size is checked before it is computed
            if right.denominator != 1:
                raise ValueError("a fractional power")
            if abs(right) > 4 * DIGITS and abs(left) not in (0, 1):
                raise OverflowError
            return _bounded(left ** int(right))
        if type(node.op) in OPERATIONS:
            return _bounded(OPERATIONS[type(node.op)](left, right))
    raise ValueError(ast.dump(node))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**DIGITS:
        raise OverflowError
    return value


def problems(count: int = 4096, seed: int = 0) -> list[dict[str, str]]:
    """Rows of sums and products of two- and three-digit numbers, with `prompt` and `answer`. For `data.train`."""
    return _rows(count, seed, held_out=False)


def held_out_problems(count: int = 256, seed: int = 1) -> list[dict[str, str]]:
    """Rows like those of `problems`, none of which is ever among these. For `data.eval`."""
    return _rows(count, seed, held_out=True)


def _rows(count: int, seed: int, held_out: bool) -> list[dict[str, str]]:
    """Random problems; those whose first factor and last summand add up to a multiple of eight are held out."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        a, b, c = (int(n) for n in rng.integers(12, (1000, 100, 1000)))
        if ((a + c) % 8 == 0) == held_out:
            rows.append({"prompt": f"What is {a} * {b} + {c}?", "answer": str(a * b + c)})
    return rows
