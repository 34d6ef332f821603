"""Reads the veRL call inside a shell script, and never runs the script.

Lines become commands, commands change variables, and the one command that names veRL's trainer gives the options.
The body of a function is read where the function is called, with the arguments of the call. Text that only a running
shell can know (command substitution, arguments of the script, assignments in an `if` or a loop) is marked, so that an
option with such text is listed and not guessed. An `ARGS+=(...)` in an `if` leaves the certain words of ARGS as they
were.

bashlex was tried (0.18): it parses no array, `[[ ]]`, `case` or `$((...))`, which scripts of veRL have, and its licence
is the GPL.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from trinity.import_verl.expand import ARITHMETIC, BRACE, COMMAND, MARK, SPLIT, Variables, expand

MODULE = "verl.trainer.main_ppo"

_TOKEN = re.compile(
    rf"""(?P<space>[ \t]+|\\\n)
    | (?P<comment>\#[^\n]*)
    | (?P<redirect>&>>?|\d*(?:>>|>&|<&|<<<|>\||>|<))
    | (?P<array>[A-Za-z_]\w*\+?=\()
    | (?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|{ARITHMETIC}|{COMMAND}|{BRACE}|[^\s;&|()<>'"\\`])+)
    | (?P<end>\n|;;|&&|\|\||[;|&])
    | (?P<paren>[()])""",
    re.X | re.S,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[([^\]]*)\](?:(\+?)=(.*))?", re.S)
_OPTION = re.compile(r"(~|\+{0,2})([^=+~\s][^=\s]*)=(.*)", re.S)
_OPTION_LINE = re.compile(r"\s*[+~]{0,2}[A-Za-z_]\w*(\.\w+)+=")
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_DECLARING = {"export", "readonly", "local", "declare", "typeset"}
_READING = {"read", "mapfile", "readarray", "getopts"}  # commands that set variables to what only a shell can know
_OPENING = {"if", "for", "while", "until", "case", "select"}
_CLOSING = {"fi", "done", "esac"}
_MOST_CALLS = 20  # of one function
_LEADING = _OPENING | _CLOSING | {"then", "else", "elif", "do", "{", "}", "!", "time"}


class ScriptError(ValueError):
    """The script gives no run to import; the message is one sentence, with the line where there is one."""


@dataclass(frozen=True)
class Option:
    """`key=value` as veRL would get it. `line` counts from 1."""

    key: str
    value: str
    line: int

    @property
    def unknown(self) -> str:
        """The first piece of the value that only a running shell can know, or an empty string."""
        found = re.search(f"{MARK}(.*?){MARK}", self.value, re.S)
        return found[1] if found else ""


@dataclass(frozen=True)
class Call:
    """The veRL call of a script: its options, the last of each key.

    `flags`: words that are no options and cannot be read (`--config-name x`, `$MORE`). `removed`: keys after a `~`.
    `notes`: what people should know about the reading.
    """

    line: int
    options: dict[str, Option]
    flags: tuple[str, ...]
    removed: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class _Command:
    """A simple command.

    `arrays` are assignments `NAME=(...)`: (name with a `+` if it appends, words). `maybe`: a test before the command
    decides if it runs. `defines`: the function whose body begins here.
    """

    maybe: bool = False
    defines: str = ""
    words: list[tuple[str, int]] = field(default_factory=list)
    arrays: list[tuple[str, list[tuple[str, int]]]] = field(default_factory=list)


def read_call(text: str) -> Call:
    """Returns the one call of veRL's PPO trainer in a script. Raises ScriptError if there is none, or more than one."""
    notes: list[str] = []
    reader = _Reader(Variables(notes))
    reader.read(list(_commands(_lines(text.replace("\r\n", "\n"), notes))))
    if not reader.calls:
        reader.read_uncalled()
    calls = reader.calls
    if not calls:
        raise ScriptError(f"no command runs `python3 -m {MODULE}`; nothing to import")
    if len(calls) > 1:
        lines = ", ".join(str(call[0][1]) for call in calls)
        raise ScriptError(f"{len(calls)} commands run {MODULE} (lines {lines}); keep the one to import")
    return _call(calls[0][0][1], calls[0][1:], notes)


class _Reader:
    """Follows commands in order. `calls` are those of veRL's trainer: words with their lines, an empty word first."""

    def __init__(self, variables: Variables) -> None:
        self.calls: list[list[tuple[str, int]]] = []
        self._variables = variables
        self._functions: dict[str, list[_Command]] = {}
        self._called: list[str] = []
        self._texts = 0

    def read(self, commands: list[_Command], unsure: bool = False) -> None:
        """Reads commands one after the other. `unsure`: a condition or a loop around them decides if they run."""
        depth, index, subshells = 0, 0, []
        while index < len(commands):
            command = commands[index]
            index += 1
            tokens = list(command.words)
            while tokens and tokens[0][0] in _LEADING:
                first = tokens.pop(0)[0]
                depth = max(depth + (first in _OPENING) - (first in _CLOSING), 0)
                if first in ("for", "select") and tokens:
                    self._variables.forget(tokens[0][0], "set by a loop")
            if tokens and tokens[0][0] == "(":
                subshells.append(self._variables.save())
            elif tokens and tokens[0][0] == ")":
                if subshells:
                    self._variables.restore(subshells.pop())
            elif command.defines:
                body, index = _body(commands, index - 1)
                self._functions[command.defines] = body
            else:
                self._read_one(tokens, command, unsure or depth > 0 or command.maybe)

    def read_uncalled(self) -> None:
        """Reads the functions that no command calls; only the shell that calls them knows their arguments."""
        for name, body in self._functions.items():
            if name not in self._called:
                self._variables.call([f"{MARK}$@ (arguments of {name}){MARK}"])
                self.read(body)

    def _read_one(self, tokens: list[tuple[str, int]], command: _Command, unsure: bool) -> None:
        variables = self._variables
        for name, parts in command.arrays:
            joined = "".join(SPLIT + value for raw, _ in parts for value in expand(raw, variables))
            _assign(f"{name}=", joined, variables, unsure)
        if not tokens:
            return
        why = "set inside a condition or a loop" if unsure else ""
        if tokens[0][0] in _DECLARING or all(_ASSIGNMENT.fullmatch(raw) or _ELEMENT.match(raw) for raw, _ in tokens):
            is_link = tokens[0][0] in _DECLARING and any(raw in ("-n", "-gn") for raw, _ in tokens)
            for raw, _ in tokens:
                if (element := _ELEMENT.fullmatch(raw)) and element[4] is not None:
                    value = " ".join(expand(element[4], variables, splitting=False))
                    index = " ".join(expand(element[2], variables, splitting=False))
                    variables.set_element(element[1], index, value, bool(element[3]), why)
                elif (found := _ASSIGNMENT.fullmatch(raw)) and is_link:
                    variables.link(found[1], " ".join(expand(found[3], variables)))
                elif found := _ASSIGNMENT.fullmatch(raw):
                    name_part = raw[: found.start(3)]
                    _assign(name_part, " ".join(expand(found[3], variables, splitting=False)), variables, unsure)
            return
        names = [raw.strip("'\"") for raw, _ in tokens]
        if names[0] in self._functions and self._called.count(names[0]) < _MOST_CALLS:
            self._called.append(names[0])
            before = variables.call([value for raw, _ in tokens[1:] for value in _argument(raw, variables)])
            self.read(self._functions[names[0]], unsure)
            variables.call(before)
        elif names[0] == "set" and "--" in names:
            given = [value for raw, _ in tokens[names.index("--") + 1 :] for value in _argument(raw, variables)]
            variables.call([f"{MARK}$@ ({why}){MARK}"] if unsure else given)
        elif names[0] == "unset":
            for name in names[1:]:
                if element := _ELEMENT.fullmatch(name):
                    variables.set_element(element[1], element[2], None, False, why)
                elif name.isidentifier():
                    _assign(f"{name}=", "", variables, unsure)
        elif names[0] in _READING or names[:2] == ["printf", "-v"]:
            for name in names[1:]:
                if name.isidentifier():
                    variables.forget(name, f"set by {names[0]}")
        elif names[0] in ("source", ".") and len(names) > 1 and not names[1].endswith(("activate", "rc", "profile")):
            file = names[1].replace('"', "")
            variables.note(f"line {tokens[0][1]}: {file} is not read; what it sets is taken from the environment")
        elif names[0] == "shift":
            variables.shift(int(names[1]) if len(names) > 1 and names[1].isdigit() else 1)
        elif MODULE in names and names[0] not in ("echo", "printf"):
            after = tokens[names.index(MODULE) + 1 :]
            line = tokens[names.index(MODULE)][1]
            self.calls.append([("", line), *((v, at) for raw, at in after for v in expand(raw, variables) if v)])
        elif names[0] not in ("echo", "printf", "cat"):
            self._read_text([(value, at) for raw, at in tokens for value in expand(raw, variables)], unsure)

    def _read_text(self, words: list[tuple[str, int]], unsure: bool) -> None:
        """Reads a command that variables hold, or that is the argument of another one (`bash -c`, `eval`)."""
        if MODULE in (values := [value for value, _ in words]):
            first = values.index(MODULE)
            self.calls.append([("", words[first][1]), *words[first + 1 :]])
        self._texts += 1
        for value, line in words if self._texts < _MOST_CALLS else ():
            if value != MODULE and re.search(rf"\s{re.escape(MODULE)}(\s|$)", value):
                self.read(list(_commands("\n" * (line - 1) + value)), unsure)


def _argument(raw: str, variables: Variables) -> list[str]:
    """The words of an argument; an empty one in quotes counts."""
    return expand(raw, variables) or ([""] if raw in ('""', "''") else [])


def _body(commands: list[_Command], start: int) -> tuple[list[_Command], int]:
    """Returns the commands of the function that begins at `start`, and the index behind them."""
    first = commands[start]
    names = [raw for raw, _ in first.words]
    inside = first.words[names.index("{") + 1 :] if "{" in names else []
    body = [_Command(words=inside, arrays=first.arrays)]
    open_braces, index = int("{" in names), start + 1
    while index < len(commands):
        words = [raw for raw, _ in commands[index].words]
        open_braces += words.count("{") - words.count("}")
        body.append(commands[index])
        index += 1
        if open_braces <= 0 and "}" in words:
            break
    return body, index


def _assign(head: str, value: str, variables: Variables, unsure: bool) -> None:
    name, append = head.rstrip("=").rstrip("+"), head.endswith("+=")
    if unsure:
        variables.change(name, value, append, "set inside a condition or a loop")
    else:
        variables.set(name, value, append)


def _call(line: int, words: list[tuple[str, int]], notes: list[str]) -> Call:
    options: dict[str, Option] = {}
    flags: list[str] = []
    removed: list[str] = []
    rest = iter(words)
    for word, at in rest:
        found = _OPTION.fullmatch(word)
        if word.startswith("-"):
            takes_next = "=" not in word and word in (
                "--config-name",
                "--config-path",
                "--config-dir",
                "-cn",
                "-cp",
                "-cd",
            )
            flags.append(f"{word} {next(rest, ('', 0))[0]}".strip() if takes_next else word)
        elif word.startswith("~"):
            key = word[1:].partition("=")[0]
            options.pop(key, None)
            removed.append(key)
        elif (MARK in word and (found is None or MARK in found[2])) or (found is None and word.startswith("${oc.env:")):
            flags.append(re.sub(r"\$\{oc\.env:(\w+)\}", r"$\1", word).replace(MARK, ""))
        elif found is None:
            shown = word.replace(MARK, "").replace("\n", " ")
            raise ScriptError(f"line {at}: {shown!r} is no option of veRL; write key=value")
        else:
            options[found[2]] = Option(found[2], found[3], at)
    return Call(line, options, tuple(flags), tuple(removed), tuple(dict.fromkeys(notes)))


def _lines(text: str, notes: list[str]) -> str:
    """The text without here-documents, and with comments between continued lines of options taken out.

    A shell ends the command at such a comment. People who put one there mean the options below it, so those are taken,
    and it is said. Line numbers stay.
    """
    lines = text.split("\n")
    for index, line in enumerate(lines):
        here = None if line.lstrip().startswith("#") else _HEREDOC.search(line)
        if here:
            for inside in range(index + 1, len(lines)):
                last, lines[inside] = lines[inside].strip() == here[2], ""
                if last:
                    break
        stripped = line.rstrip()
        if stripped.endswith("\\") and not stripped.lstrip().startswith("#"):
            lines[index] = stripped
        continued = index > 0 and lines[index - 1].endswith("\\")
        if continued and stripped.lstrip().startswith("#"):
            below = next((x for x in lines[index + 1 :] if x.strip() and not x.lstrip().startswith("#")), "")
            if _OPTION_LINE.match(below):
                lines[index] = "\\"
                notes.append(
                    f"line {index + 1}: a shell ends the command at this comment; the options below it are taken"
                )
            else:
                lines[index] = ""
        elif continued and not stripped and lines[index - 1] == "\\":
            lines[index] = "\\"
    return "\n".join(lines)


def _commands(text: str) -> Iterator[_Command]:
    """Simple commands in order: words as they are written, quotes included, each with its line."""
    command, redirected = _Command(), False
    array: list[tuple[str, int]] | None = None
    at, line, open_brackets = 0, 1, 0
    subshells: list[int] = []  # numbers of open brackets inside each
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ScriptError(f"line {line}: a quote or bracket that opens here is not closed")
        kind, raw = token.lastgroup, token[0]
        if kind == "array":
            array = []
            command.arrays.append((raw[:-2], array))
        elif kind == "word" and redirected:
            redirected = False
        elif kind == "word":
            raw = raw.replace("\\\n", "")
            (command.words if array is None else array).append((raw, line))
        elif kind == "redirect":
            redirected = True
        elif kind == "paren" and raw == ")" and array is not None:
            array = None
        elif kind == "paren" and raw == "(" and array is None:
            names = [word for word, _ in command.words]
            open_brackets += 1
            if all(name in _LEADING for name in names) and not command.defines:
                yield command
                yield _Command(words=[("(", line)])
                command = _Command()
                subshells.append(open_brackets)
            elif len(names) == 1 or names[0:1] == ["function"]:
                command.defines = names[-1]
        elif kind == "paren" and raw == ")":
            if subshells and subshells[-1] == open_brackets:
                subshells.pop()
                yield command
                yield _Command(words=[(")", line)])
                command = _Command()
            elif not open_brackets:  # behind the pattern of a `case`
                command.words = [word for word in command.words[:1] if word[0] in _OPENING]
            open_brackets = max(open_brackets - 1, 0)
        elif kind == "end" and array is None:
            if not command.defines and command.words and command.words[0][0] == "function" and len(command.words) > 1:
                command.defines = command.words[1][0]
            yield command
            first = command.words[0][0] if command.words else ""
            tested = raw == "||" or (raw == "&&" and first in ("[", "[[", "test"))
            command, redirected = _Command(maybe=tested), False
        line += token[0].count("\n")
        at = token.end()
    yield command
