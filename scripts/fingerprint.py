"""Print how often docstrings, comments and pages use phrases of a grammar that CONTRIBUTING.md advises against.

python scripts/fingerprint.py                 # per 10,000 words, for core and satellites
python scripts/fingerprint.py --docs          # per 10,000 words, for pages written by hand and YAML comments
python scripts/fingerprint.py --worst 400     # the texts with the most such phrases; with --docs those of pages
python scripts/fingerprint.py --words "beside"  # every place of one phrase
python scripts/fingerprint.py --change main   # phrases that a change adds to the merge base with main
python scripts/fingerprint.py --change        # the same against HEAD~1 on main; `make lint` prints it and never fails
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
_PAGES = ("docs/*.md", "README.md", "*/README.md", "examples/*.md", "examples/*.yaml")  # CONTRIBUTING.md quotes phrases
_OTHER_PAGES = re.compile(r"^docs/(zh|development/decisions)/|\.zh\.md$|^docs/configuration\.md$")
_CODE = re.compile(r"`[^`\n]*`")  # identifiers are no prose
_WORD = re.compile(r"\S*\w\S*")


@dataclass(frozen=True)
class Text:
    """A docstring, a comment, or a line of a page."""

    path: Path  # relative to the repository
    line: int
    text: str
    is_docstring: bool

    def phrases(self) -> list[str]:
        prose = _CODE.sub("", self.text)
        found = [name for name, pattern in PHRASES.items() for _ in pattern.findall(prose)]
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


def page_files() -> list[Path]:
    """The tracked pages and YAML files of docs/, the READMEs and examples/, without decisions and translations."""
    listed = subprocess.run(["git", "ls-files", *_PAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines() if not _OTHER_PAGES.search(line)]


def page_texts(path: Path) -> Iterator[Text]:
    """Lines written by hand, outside code; of a YAML file its comments."""
    code = generated = False
    for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1):
        if path.suffix == ".yaml":
            _, hash_sign, comment = line.partition("# ")
            if hash_sign:
                yield Text(path, number, comment, False)
            continue
        code ^= line.lstrip().startswith("```")
        if line.startswith("<!--"):
            generated = "written by `make docs`" in line or "learning table" in line
        elif not (code or generated or line.lstrip().startswith("```")):
            yield Text(path, number, line, False)


def count(found: list[Text]) -> tuple[int, Counter[str]]:
    words = sum(len(_WORD.findall(text.text)) for text in found)
    return words, Counter(phrase for text in found for phrase in text.phrases())


def print_rates() -> None:
    for title, folders in (("core", CORE), ("satellites", ("satellites",))):
        print_rate(title, [text for path in product_files(folders) for text in texts(path)], [*PHRASES, "opening"])


def print_rate(title: str, found: list[Text], names: list[str]) -> None:
    words, phrases = count(found)
    print(f"{title}: {words} words; phrases per 10,000 words")
    for name in names:
        print(f"  {name:18} {phrases[name] * 10_000 / max(words, 1):6.2f}  ({phrases[name]})")


def merge_base(base: str) -> str:
    """The commit that a change started from; HEAD~1 where HEAD is on `base` already."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    found = git("merge-base", "HEAD", base)
    return git("rev-parse", "HEAD~1") if found == git("rev-parse", "HEAD") else found


def added_lines(base: str) -> set[tuple[Path, int]]:
    """The lines that the working tree adds to the commit `base`, as (path, line)."""
    command = ["git", "diff", "-U0", "--no-color", base, "--", "*.py", "*.md", "*.yaml"]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found, path = set(), Path()
    for row in diff.splitlines():
        if row.startswith("+++ b/"):
            path = Path(row[6:])
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row):
            start, length = int(hunk[1]), int(hunk[2] or 1)
            found |= {(path, line) for line in range(start, start + length)}
    return found


def print_change(base: str) -> None:
    try:
        lines = added_lines(merge_base(base))
    except subprocess.CalledProcessError as error:
        print(f"fingerprint: no change to read, {error.stderr.strip()}")
        return
    near = {(path, line + step) for path, line in lines for step in range(-1, 1)}
    changed = {path for path, _ in near}
    found = [text for path in product_files((*CORE, "satellites")) if path in changed for text in texts(path)]
    found += [text for path in page_files() if path in changed for text in page_texts(path)]
    found = [text for text in found if text.phrases() and (text.path, text.line) in near]
    print_places(found, len(found))


def print_places(places: list[Text], limit: int) -> None:
    for text in places[:limit]:
        print(f"{text.path}:{text.line}: {', '.join(text.phrases())}: {text.text.splitlines()[0][:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--worst", type=int, metavar="N")
    parser.add_argument("--words", metavar="PHRASE")
    parser.add_argument("--change", metavar="BASE", nargs="?", const="main")
    parser.add_argument("folders", nargs="*", default=[*CORE, "satellites"])
    given = parser.parse_args()
    if given.change:
        print_change(given.change)
    elif not (given.worst or given.words or given.docs):
        print_rates()
    else:
        found = [text for path in page_files() for text in page_texts(path)] if given.docs else []
        found = found or [text for path in product_files(tuple(given.folders)) for text in texts(path)]
        phrased = [text for text in found if text.phrases()]
        if given.words:
            print_places([text for text in phrased if given.words in text.phrases()], len(phrased))
        elif given.worst:
            print_places(sorted(phrased, key=lambda text: -len(text.phrases())), given.worst)
        else:
            print_rate("pages", found, list(PHRASES))


if __name__ == "__main__":
    main()
