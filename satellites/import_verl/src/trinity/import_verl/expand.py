"""Expansion of a shell word: quotes, variables, arithmetic. Nothing is run."""

import ast
import re
import warnings
from collections.abc import Iterator

MARK = "\x00"  # around a piece that only a running shell can know
SPLIT = "\x01"  # where an expansion splits a word

ARITHMETIC = r"\$\(\((?:[^()]|\([^()]*\))*\)\)"
COMMAND = r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`"
# Each character can be matched in one way: else a brace that is not closed is sought in all of them.
BRACE = r"\$\{(?:[^{}$]|\$(?!\{)|\{[^{}]*\}|\$\{(?:[^{}]|\$\{[^{}]*\})*\})*\}"
_DOLLAR = (
    rf"(?P<arithmetic>{ARITHMETIC})|(?P<command>{COMMAND})|(?P<brace>{BRACE})|(?P<name>\$(?:[A-Za-z_]\w*|[0-9@*#?!$-]))"
)
_PIECE = re.compile(
    rf"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escape>.)|{_DOLLAR}|(?P<text>.)""", re.S
)
_INSIDE_QUOTES = re.compile(rf'\\(?P<escape>["\\$`])|{_DOLLAR}|(?P<text>.)', re.S)
_PARAMETER = re.compile(r"(\w+)(?:\[[@*]\])?(?:(:?[-=+])(.*))?", re.S)
_SLICE = re.compile(r"([@*]|\w+)(?:\[[@*]\])?:\s?(\d{1,4})(?::(\d{1,4}))?")  # of the arguments, or of an array
_WHOLE_ARRAY = re.compile(r"\$\{(?:\w+\[@\]|@)(?::\s?\d+){0,2}\}|\$@")
# White space that splits a word is in no piece of these.
_SPLITS = re.compile(rf"({MARK}.*?{MARK}|\$\{{oc\.env:(?:[^{{}}]|\$\{{[^{{}}]*\}})*\}})|\s+", re.S)
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)(?:,(.*))?\}", re.S)
_OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # a shell rounds towards zero
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}


class Variables:
    """Variables that the script has set so far. A variable it has not set is the environment's: `${oc.env:NAME}`."""

    def __init__(self, notes: list[str]) -> None:
        self._values: dict[str, str] = {}
        self._arguments: list[str] = []  # of the function that is read
        self._targets: dict[str, str] = {}  # of names that `declare -n` made
        self._notes = notes

    def save(self) -> tuple[dict[str, str], list[str]]:
        return dict(self._values), list(self._arguments)

    def restore(self, saved: tuple[dict[str, str], list[str]]) -> None:
        """Takes back what a subshell set."""
        self._values, self._arguments = saved

    def link(self, name: str, target: str) -> None:
        """Makes a name stand for another variable."""
        self._targets[name] = target

    def _named(self, name: str) -> str:
        return self._targets.get(name, name)

    def set_element(self, name: str, index: str, value: str | None, append: bool, why: str) -> None:
        """Sets an element of an array, or removes it (None). Where that is uncertain, it is said with the array."""
        name = self._named(name)
        words = self._values.get(name, "").split(SPLIT)[1:]
        place = int(index) if re.fullmatch(r"-?\d{1,4}", index) else None
        known = place is not None and -len(words) <= place <= len(words) and MARK not in self._values.get(name, "")
        if why or not known or place is None or (value is None and place == len(words)):
            said = f"{name}[{index}]" + (" is removed" if value is None else f"={value}")
            self.change(name, f"{SPLIT}{said}", True, why or "an element")
            return
        before = words[place] if -len(words) <= place < len(words) else ""
        words[place : place + 1 or None] = [] if value is None else [before + value if append else value]
        self._values[name] = "".join(SPLIT + word for word in words)

    def set(self, name: str, value: str, append: bool = False) -> None:
        name = self._named(name)
        self._values[name] = self._values.get(name, "") + value if append else value

    def forget(self, name: str, why: str) -> None:
        name = self._named(name)
        self._values[name] = f"{MARK}${name} ({why}){MARK}"

    def change(self, name: str, value: str, append: bool, why: str) -> None:
        """Assigns a value that only a running shell knows to be assigned. Words that stay in any case are kept."""
        name = self._named(name)
        old = self._values.get(name, "")
        if not append and value == old:
            return
        if append or (old and value.startswith(old)):
            added = " ".join((value if append else value.removeprefix(old)).replace(MARK, "").split(SPLIT)).strip()
            self._values[name] = f"{old}{SPLIT}{MARK}what {name} gains ({why}): {added}{MARK}"
        else:
            self.forget(name, why)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def call(self, words: list[str]) -> list[str]:
        """Sets the arguments of a function, and returns those before it."""
        before = self._arguments
        for number in range(1, max(len(before), len(words)) + 1):
            self._values.pop(str(number), None)
        self._arguments = words
        self._values |= {str(number): word for number, word in enumerate(words, 1)}
        self._values["@"] = self._values["*"] = SPLIT.join(words)
        return before

    @property
    def arguments(self) -> list[str]:
        return self._arguments

    def shift(self, count: int) -> None:
        self.call(self._arguments[count:])

    def look_up(self, name: str, default: str | None, or_empty: bool = True) -> str:
        name = self._named(name)
        if name in self._values and (self._values[name] or default is None or not or_empty):
            return self._values[name]
        if name in ("@", "*"):
            return ""
        if name.isdigit():
            if default is None:
                return f"{MARK}${name} (an argument of the script){MARK}"
            self._notes.append(f"argument {name} of the script is taken to be its default {default!r}")
            return default
        return environment(name, default)

    def number(self, text: str) -> int | None:
        """A whole number; a reference to the environment counts as its default."""
        at_default = default_of(text)
        if at_default != text:
            self._notes.append(f"arithmetic is done with {text} = {at_default}")
        return int(at_default) if re.fullmatch(r"\s*[+-]?\d{1,18}\s*", at_default) else None


def environment(name: str, default: str | None) -> str:
    """The YAML's reference to an environment variable."""
    if default is None:
        return f"${{oc.env:{name}}}"
    if MARK in default or SPLIT in default:
        return default
    plain = re.fullmatch(r"(?:[\w./+@%-]|\$\{oc\.env:[^{}]*\})+", default)
    return f"${{oc.env:{name},{default if plain else repr(default)}}}"


def default_of(text: str) -> str:
    """Returns the default of a reference to the environment; other text unchanged."""
    found = _ENVIRONMENT.fullmatch(text)
    return default_of(found[2].strip("'")) if found and found[2] is not None else text


def expand(raw: str, variables: Variables, splitting: bool = True) -> list[str]:
    """The words that a written word becomes, empty ones left out. Without `splitting` (an assignment) it is one."""
    text = "".join(_pieces(raw, variables))
    return [word for word in text.split(SPLIT) if word] if splitting else [text.replace(SPLIT, " ")]


def _pieces(raw: str, variables: Variables) -> Iterator[str]:
    for piece in _PIECE.finditer(raw):
        if (quoted := piece["double"]) is not None:
            whole_array = _WHOLE_ARRAY.fullmatch(quoted)
            for inner in _INSIDE_QUOTES.finditer(quoted):
                value = _value(inner, variables)
                yield value if whole_array else value.replace(SPLIT, " ")
        elif piece["single"] is not None:
            yield piece["single"]
        else:
            value = _value(piece, variables)
            plain = piece["text"] or piece["escape"]
            yield value if plain else _SPLITS.sub(lambda found: found[1] or SPLIT, value)


def _value(piece: re.Match[str], variables: Variables) -> str:
    kind, text = piece.lastgroup, piece[0]
    if kind == "arithmetic":
        return _arithmetic(text, variables)
    if kind == "command":
        return environment("PWD", None) if text.strip("$()` ") == "pwd" else f"{MARK}{text}{MARK}"
    if kind == "name":
        return _known(text[1:], None, True, text, variables)
    if kind == "brace":
        if part := _SLICE.fullmatch(text[2:-1]):
            return _slice(part, text, variables)
        if text[2] in "@*":
            given = variables.look_up("@", None)
            return given if len(text) == 4 or not given else f"{MARK}{text}{MARK}"
        found = _PARAMETER.fullmatch(text[2:-1])
        if found is None:
            return f"{MARK}{text}{MARK}"
        if found[2] and found[2].endswith("+"):  # the word, where the variable is set
            value = variables.look_up(found[1], None)
            unsure = MARK in value or "${oc.env:" in value
            return f"{MARK}{text}{MARK}" if unsure else "".join(_pieces(found[3], variables)) if value else ""
        default = None if found[2] is None else "".join(_pieces(found[3], variables))
        return _known(found[1], default, found[2] is None or found[2].startswith(":"), text, variables)
    return piece[kind] if kind else text


def _slice(part: re.Match[str], text: str, variables: Variables) -> str:
    """`${@:2}`, `${ARGS[@]:1:3}`: some of the words, where a running shell is not needed to count them."""
    name, first, count = part[1], int(part[2]), part[3]
    joined = "" if name in "@*" else variables.look_up(name, None)
    words = variables.arguments if name in "@*" else [word for word in joined.split(SPLIT) if word]
    begin = first - 1 if name in "@*" else first
    counted = words if count else words[:begin]  # each may become several words, or none
    uncountable = any(MARK in word or word.startswith("${oc.env:") for word in counted)
    if begin < 0 or uncountable or (name not in "@*" and not joined.startswith(SPLIT)):
        return f"{MARK}{text}{MARK}"
    return "".join(SPLIT + word for word in words[begin : begin + int(count) if count else None])


def _known(name: str, default: str | None, or_empty: bool, text: str, variables: Variables) -> str:
    if name in "#?!$-":
        return f"{MARK}{text}{MARK}"
    return variables.look_up(name, default, or_empty)


def _arithmetic(text: str, variables: Variables) -> str:
    """`$((...))` of whole numbers: + - * / % and brackets. What nests too deeply for Python only a shell can know."""
    names: dict[str, int | None] = {}

    def name_of(found: re.Match[str]) -> str:
        key = f"v{len(names)}"
        names[key] = variables.number(_value(found, variables))
        return key

    body = re.sub(_DOLLAR, name_of, text[3:-2])

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            value = names[node.id] if node.id in names else variables.number(variables.look_up(node.id, None))
            if value is None:
                raise ValueError(node.id)
            return value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        raise ValueError(text)

    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of `3if`, for one
            return str(of(ast.parse(" ".join(body.split()), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return f"{MARK}{text}{MARK}"
