"""Exact value of an arithmetic expression of + - * / and parentheses, and the search for one with a given value.

No names, no powers, no evaluation of code.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import permutations

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


def find_expression(numbers: Sequence[int], target: int, operators: str = "+-*/") -> str | None:
    """An expression that uses every number once and has the target's value; None if there is none.

    Tries every way of combining two values until one is left, each multiset of values once: a moment for up to five
    numbers, seconds for six.
    """
    seen: set[tuple[Fraction, ...]] = set()

    def search(items: list[tuple[Fraction, str]]) -> str | None:
        values = tuple(sorted(value for value, _ in items))
        if values in seen:
            return None
        seen.add(values)
        if len(items) == 1:
            return items[0][1] if items[0][0] == target else None
        for first, second in permutations(range(len(items)), 2):
            rest = [item for index, item in enumerate(items) if index not in (first, second)]
            for made in _combinations(items[first], items[second], operators, first < second):
                found = search([*rest, made])
                if found is not None:
                    return found
        return None

    found = search([(Fraction(number), str(number)) for number in numbers])
    return found[1:-1] if found is not None and found.startswith("(") else found


def _combinations(
    first: tuple[Fraction, str], second: tuple[Fraction, str], operators: str, ordered: bool
) -> Iterator[tuple[Fraction, str]]:
    """Yields the results of two values. Sums and products, which have no order, only when `ordered`."""
    (a, left), (b, right) = first, second
    if ordered and "+" in operators:
        yield a + b, f"({left} + {right})"
    if ordered and "*" in operators:
        yield a * b, f"({left} * {right})"
    if "-" in operators:
        yield a - b, f"({left} - {right})"
    if "/" in operators and b:
        yield a / b, f"({left} / {right})"
