"""Check and count the files on the two ways of docs/architecture.md, and write the numbers into it; count words.

    python docs/count_ways.py            # prints the words of each page, written by hand and generated

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
_GENERATED = re.compile(r"<!-- (?:[^>]*written by `make docs`|learning table) -->(.*?)<!-- end of", re.DOTALL)
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
    """What each module of the product imports, anywhere in it, by dotted names."""
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
    """Files that are not there, or that no file of a way, no package of one and no wiring imports."""
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


def counted(page: str) -> str:
    """The page with the numbers of today."""
    experience, version = ([path for table in tables(section(page, title)) for path in table] for title in SECTIONS)
    both = len(set(experience) & set(version))
    for title, files in zip(SECTIONS, (experience, version), strict=True):
        before, after = page.split(title + "\n", 1)
        after = re.sub(r"each once: \d+ files", f"each once: {len(set(files))} files", after, count=1)
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
