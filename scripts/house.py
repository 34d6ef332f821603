"""Count the house: lines and files, the two ways, circles, protobuf beyond the edge, and the fingerprint.

python scripts/house.py

`make docs` writes the numbers of docs/architecture.md; tests/contract compares them.
"""

import re
from collections import Counter, defaultdict
from pathlib import Path

import count_ways
import fingerprint
import grimp

SATELLITES = ("satellites",)
_EDGE = ("wire", "servicer", "client")


def package(path: Path) -> str:
    """The folder that holds `src` or, for proto and scripts, the first folder."""
    return path.as_posix().partition("/src/")[0] if "src" in path.parts else path.parts[0]


def lines(folders: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Lines and files of each package below `folders`, without tests and generated stubs."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in fingerprint.product_files(folders):
        counts[package(path)][0] += len((fingerprint.ROOT / path).read_text().splitlines())
        counts[package(path)][1] += 1
    return {name: (total, files) for name, (total, files) in sorted(counts.items())}


def total(counts: dict[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(count for count, _ in counts.values()), sum(files for _, files in counts.values())


def imports() -> dict[str, set[str]]:
    """The modules that each module of the product imports, under TYPE_CHECKING too."""
    settings = (fingerprint.ROOT / ".importlinter").read_text()
    roots = re.findall(r"^    (trinity\.\w+)$", settings.partition("exclude_type")[0], re.MULTILINE)
    graph = grimp.build_graph(*roots, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through other modules of the group."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        reached[start] = seen
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in found if group)


def protobuf_beyond_the_edge(graph: dict[str, set[str]]) -> list[str]:
    """The modules other than wire, servicer and client that import a generated stub."""
    return sorted(
        name
        for name, imported in graph.items()
        if not name.startswith("trinity.api.")
        and name.rpartition(".")[2] not in _EDGE
        and any("_pb2" in other for other in imported)
    )


def print_counts(title: str, counts: dict[str, tuple[int, int]]) -> None:
    for name, (count, files) in [(title, total(counts)), *counts.items()]:
        print(f"{name:24} {count:7} lines {files:4} files")


def main() -> None:
    print_counts("core", lines(fingerprint.CORE))
    print_counts("satellites", lines(SATELLITES))
    experience, version = count_ways.ways(count_ways.PAGE.read_text())
    print(f"files on the way of an experience {len(experience)}, of a version {len(version)}")
    graph = imports()
    print(f"circles between modules: {len(circles(graph))}", *map(", ".join, circles(graph)), sep="\n  ")
    beyond = Counter(name.split(".")[1] for name in protobuf_beyond_the_edge(graph))
    where = ", ".join(f"{name} {count}" for name, count in sorted(beyond.items()))
    print(f"modules with _pb2 beyond wire, servicer and client: {sum(beyond.values())} {where}")
    fingerprint.print_rates()


if __name__ == "__main__":
    main()
