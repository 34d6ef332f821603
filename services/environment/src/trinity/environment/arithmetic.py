"""Exact value of an arithmetic expression of + - * / and parentheses. No names, no powers, no evaluation of code."""

import ast
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 300
_MAX_DIGITS = 12

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


class BadExpression(ValueError):
    """Not an expression of the allowed kind; the text says why."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Value and the numbers used, in order. Raises BadExpression, in bounded time for any text."""
    if len(text) > MAX_LENGTH:
        raise BadExpression(f"is longer than {MAX_LENGTH} characters")
    if not text.isascii() or not set(text) <= set("0123456789+-*/() "):
        raise BadExpression("may hold digits, + - * / and parentheses only")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        numbers: list[int] = []
        return _value(tree.body, numbers), numbers
    except ZeroDivisionError:
        raise BadExpression("divides by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, BadExpression):
            raise
        raise BadExpression("is no arithmetic expression") from None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        if node.value >= 10**_MAX_DIGITS:
            raise BadExpression(f"has a number of more than {_MAX_DIGITS} digits")
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    raise BadExpression("may use + - * / and parentheses only")
