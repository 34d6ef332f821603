"""Print how often docstrings and comments use phrases of a grammar that CONTRIBUTING.md advises against.

python scripts/fingerprint.py                 # per 10,000 words, for core and satellites
python scripts/fingerprint.py --worst 400     # the docstrings and comments with the most such phrases
python scripts/fingerprint.py --words "beside"  # every place of one phrase
python scripts/fingerprint.py --change main   # phrases that a change adds; `make lint` prints them and never fails
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ("proto", "sdk", "lib", "services", "cli")
PHRASES = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "alone": r"\balone\b",
        "one that": r"\bone that\b",
        "what is": r"\bwhat is\b",
        "beside": r"\bbeside\b",
        "asked": r"\basked\b",
        "of its own": r"\bof its own\b",
        "those that": r"\bthose that\b",
        "of theirs": r"\bof (?:theirs|one's own)\b",
        "nobody, whoever": r"\b(?:nobody|somebody|whoever|anew)\b",
        "goes on, lies in": r"\b(?:goes on|lies in|given up|in words|held back)\b",
    }.items()
}
OPENING = re.compile(r"(?:What|Whether|Of|As|How|Who|Where) ")
_WORD = re.compile(r"\S*\w\S*")


@dataclass(frozen=True)
class Text:
    """One docstring or comment."""

    path: Path  # relative to the repository
    line: int
    text: str
    is_docstring: bool

    def phrases(self) -> list[str]:
        found = [name for name, pattern in PHRASES.items() for _ in pattern.findall(self.text)]
        if self.is_docstring and OPENING.match(self.text.lstrip()):
            found.append("opening")
        return found


def product_files(folders: tuple[str, ...]) -> list[Path]:
    """The tracked Python files of the product below `folders`, without tests and generated stubs."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines() if line.endswith(".py")]
    return [path for path in paths if "tests" not in path.parts and not re.search(r"_pb2(_grpc)?\.py$", path.name)]


def texts(path: Path) -> Iterator[Text]:
    source = (ROOT / path).read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Text(path, node.body[0].lineno, docstring, True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string.lstrip("# "), False)


def count(found: list[Text]) -> tuple[int, Counter[str]]:
    words = sum(len(_WORD.findall(text.text)) for text in found)
    return words, Counter(phrase for text in found for phrase in text.phrases())


def print_rates() -> None:
    for title, folders in (("core", CORE), ("satellites", ("satellites",))):
        found = [text for path in product_files(folders) for text in texts(path)]
        words, phrases = count(found)
        print(f"{title}: {words} words of docstrings and comments; phrases per 10,000 words")
        for name in [*PHRASES, "opening"]:
            print(f"  {name:18} {phrases[name] * 10_000 / max(words, 1):6.2f}  ({phrases[name]})")


def added_lines(base: str) -> set[tuple[Path, int]]:
    """The lines that the working tree adds to `base`, as (path, line)."""
    command = ["git", "diff", "-U0", "--no-color", base, "--", "*.py"]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found, path = set(), Path()
    for row in diff.splitlines():
        if row.startswith("+++ b/"):
            path = Path(row[6:])
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row):
            start, length = int(hunk[1]), int(hunk[2] or 1)
            found |= {(path, line) for line in range(start, start + length)}
    return found


def print_places(places: list[Text], limit: int) -> None:
    for text in places[:limit]:
        print(f"{text.path}:{text.line}: {', '.join(text.phrases())}: {text.text.splitlines()[0][:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, metavar="N")
    parser.add_argument("--words", metavar="PHRASE")
    parser.add_argument("--change", metavar="BASE")
    parser.add_argument("folders", nargs="*", default=[*CORE, "satellites"])
    given = parser.parse_args()
    if not (given.worst or given.words or given.change):
        print_rates()
        return
    found = [text for path in product_files(tuple(given.folders)) for text in texts(path) if text.phrases()]
    if given.words:
        print_places([text for text in found if given.words in text.phrases()], len(found))
    elif given.change:
        lines = added_lines(given.change)
        near = {(path, line + step) for path, line in lines for step in range(-1, 1)}
        print_places([text for text in found if (text.path, text.line) in near], len(found))
    else:
        print_places(sorted(found, key=lambda text: -len(text.phrases())), given.worst)


if __name__ == "__main__":
    main()
