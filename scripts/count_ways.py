"""Check the files on the two ways of docs/architecture.md, write their numbers into it, and count the words of docs/.

    python scripts/count_ways.py            # prints the words of each page, written by hand and generated

The tables there are the list, in order. Each file must exist, and be imported by another file of its way, by its
package, or by the wiring of a service; the first file of a table may be reached over the network instead.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
SECTIONS = ("## The way of one experience through the code", "## The way of one version through the code")
_GENERATED = re.compile(r"<!-- (?:[^>]*written by `make docs`|\w+ table) -->(.*?)<!-- end of", re.DOTALL)
_WORD = re.compile(r"\S*\w\S*")
_WIRING = re.compile(r"\.(main|service|build|runs?|start)$")
_SOURCES = ("sdk/src", "cli/src", *(str(p.relative_to(ROOT)) for p in ROOT.glob("lib/*/src")),
            *(str(p.relative_to(ROOT)) for p in ROOT.glob("services/*/src")),
            *(str(p.relative_to(ROOT)) for p in ROOT.glob("satellites/*/src")))  # fmt: skip


def section(page: str, title: str) -> str:
    return page.split(title + "\n", 1)[1].split("\n## ", 1)[0]


def tables(text: str) -> list[list[Path]]:
    """The files of each table of a section, relative to the repository."""
    found: list[list[Path]] = []
    folder = ""
    for line in text.splitlines():
        if heading := re.match(r"\*\*.*?(?:\(`([\w/]+)`\)|: (lib/\w+))?\*\*(?: \(`([\w/]+)`\))?", line):
            folder = heading[1] or heading[2] or heading[3] or ""
            found.append([])
        elif line.startswith("| ") and not line.startswith(("| file", "|---")):
            cell = line.split("|")[1]
            other = re.match(r"\s*((?:lib|services|satellites)/\w+|sdk|cli)\s+`", cell)
            found[-1] += [_file(other[1] if other else folder, name) for name in re.findall(r"`([^`]+)`", cell)]
    return found


def _file(folder: str, name: str) -> Path:
    package = folder.rpartition("/")[2]
    return Path(folder) / "src/trinity" / package / name


@cache
def imports() -> dict[str, set[str]]:
    """The dotted names that each module of the product imports, at any place in it."""
    found: dict[str, set[str]] = {}
    for source in _SOURCES:
        for path in (ROOT / source / "trinity").rglob("*.py"):
            names: set[str] = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_modules":
                    names |= {_module(sibling.relative_to(ROOT)) for sibling in path.parent.glob("*.py")}
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value.replace(":", "."))  # classes that are named in text, as for vLLM
            found[_module(path.relative_to(ROOT))] = names
    return found


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    dotted = ".".join(parts[parts.index("trinity") :])
    return dotted.removesuffix(".__init__")


def problems(way: list[list[Path]]) -> list[str]:
    """Names the missing files, and those that no file of a way, no package of a way and no wiring imports."""
    listed = {_module(path) for table in way for path in table}
    packages = {name.rpartition(".")[0] for name in listed}
    on_the_way = {name for name in imports() if name in listed | packages or _WIRING.search(name)}
    found = []
    for table in way:
        for path in table:
            if not (ROOT / path).is_file():
                found.append(f"{path} is not there")
                continue
            name = _module(path)
            used = set().union(*(imports()[user] for user in on_the_way - {name}))
            reached = name in used or any(other.startswith(name + ".") for other in used)
            if not reached and path != table[0]:
                found.append(f"nothing on the way imports {path}")
    return found


def ways(page: str) -> list[list[Path]]:
    """The files of the way of an experience and of the way of a version, each once."""
    return [list(dict.fromkeys(p for table in tables(section(page, title)) for p in table)) for title in SECTIONS]


def limits(page: str) -> list[int]:
    """The number of files that each way may have. People write it, with the reason when it grows."""
    return [int(re.search(r"at most (\d+)", section(page, title))[1]) for title in SECTIONS]  # type: ignore[index]


def counted(page: str) -> str:
    """The page with today's numbers of files."""
    experience, version = ways(page)
    both = len(set(experience) & set(version))
    for title, files in zip(SECTIONS, (experience, version), strict=True):
        before, after = page.split(title + "\n", 1)
        after = re.sub(r"each once: \d+ files", f"each once: {len(files)} files", after, count=1)
        page = before + title + "\n" + after
    return re.sub(r"of which \d+ are also on the way", f"of which {both} are also on the way", page, count=1)


def words(page: Path) -> tuple[int, int]:
    """Words that people write, and words that `make docs` and benchmarks write. A word has a letter or a digit."""
    text = page.read_text()
    generated = text if page == ROOT / "docs/configuration.md" else " ".join(_GENERATED.findall(text))
    count = len(_WORD.findall(generated))
    return len(_WORD.findall(text)) - count, count


def pages() -> list[Path]:
    """The pages of docs/ without the records of decisions, which stay as they are, and without translations."""
    return sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("decisions", "zh"))


def main() -> int:
    page = PAGE.read_text()
    found = problems([table for title in SECTIONS for table in tables(section(page, title))])
    if found:
        print(*found, sep="\n")
        return 1
    PAGE.write_text(counted(page))
    counts = {str(path.relative_to(ROOT)): words(path) for path in pages()}
    counts["all"] = (sum(by_hand for by_hand, _ in counts.values()), sum(made for _, made in counts.values()))
    for name, (by_hand, made) in sorted(counts.items(), key=lambda item: -item[1][0]):
        print(f"{by_hand:6} {made:6}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
