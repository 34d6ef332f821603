"""Decides which answers are safe where a library evaluates them as Python.

Some scorers of reasoning-gym pass the policy's text to `eval`, or to sympy's parser, which evaluates it too. Only lists
of plain values, cheap formulas, and texts without any call are let through.
"""

import ast
import re

MAX_CHARACTERS = 5000
_MAX_NUMBER = 10**30
_MAX_EXPONENT = 100
# Nothing can be called without brackets, and nothing becomes large without * and <<.
_PLAIN = re.compile(r"[\w\s,.:;='\"?|°-]*")
# Propositional logic, which Python cannot read. Single letters: its scorer tries all values of all variables.
_LOGIC = re.compile(r"[A-Z\s()]*[∧∨¬→↔][A-Z\s()∧∨¬→↔]*")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitXor)
_FUNCTIONS = {
    *(
        "sqrt",
        "cbrt",
        "root",
        "exp",
        "log",
        "ln",
        "Abs",
        "abs",
        "sign",
        "erf",
        "Rational",
        "Integer",
        "Float",
        "Symbol",
    ),
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh"),
}


def harmless(answer: str) -> bool:
    """Tells if evaluating an answer only computes a small value. Linear in the answer's length."""
    if len(answer) > MAX_CHARACTERS or "__" in answer:
        return False
    if _PLAIN.fullmatch(answer) or _LOGIC.fullmatch(answer):
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
        return _values(tree) or _formula(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _values(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(map(_values, node.elts))
    if isinstance(node, ast.UnaryOp):
        return _values(node.operand)
    return isinstance(node, ast.Constant)


def _formula(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int() | float() as number):
            return abs(number) < _MAX_NUMBER
        case ast.Name():
            return True
        case ast.UnaryOp(operand=operand):
            return _formula(operand)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _FUNCTIONS and all(map(_formula, arguments))
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            return _formula(base) and _formula(exponent) and _small_power(base, exponent)
        case ast.BinOp(op=operator, left=left, right=right):
            return isinstance(operator, _OPERATORS) and _formula(left) and _formula(right)
    return False


def _small_power(base: ast.expr, exponent: ast.expr) -> bool:
    """No towers of numbers; of symbols a power of a power is no work."""
    numbers = [part.value for part in ast.walk(exponent) if isinstance(part, ast.Constant)]
    if any(isinstance(part, ast.Pow) for part in ast.walk(exponent)):
        return False
    if any(not isinstance(number, int | float) or abs(number) > _MAX_EXPONENT for number in numbers):
        return False
    parts = list(ast.walk(base))
    return any(isinstance(part, ast.Name) for part in parts) or not any(isinstance(part, ast.Pow) for part in parts)
