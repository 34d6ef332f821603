"""Checks that tests find broken code: applies each mutation in a copy of the tree, and runs its test there.

    python tests/mutations/run_mutations.py [--list] [-k PART] [--seconds N]

The lists are the other files of this folder. A test must pass as the tree is, and fail with the mutation; a test that
passes, or that cannot be collected, means exit code 1. It takes a start of the test's parts for each: minutes.
"""

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(FOLDER.parent))

from mutations.mutation import Mutation  # noqa: E402 - from this tree, wherever the script is called

_PASSED, _FAILED = 0, 1  # exit codes of pytest; other codes mean that no test ran


def mutations() -> list[Mutation]:
    """Returns the mutations of all lists."""
    others = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("mutation", "run_mutations"))
    return [mutation for path in others for mutation in runpy.run_path(str(path))["MUTATIONS"]]


def problem(mutation: Mutation, root: Path = ROOT) -> str:
    """Returns the reason why a mutation cannot be applied; "" if it can."""
    path, test = root / mutation.path, root / mutation.test.partition("::")[0]
    for file in (path, test):
        if not file.is_file():
            return f"{file.relative_to(root)} does not exist"
    count = path.read_text().count(mutation.old)
    return "" if count == 1 else f"{mutation.old!r} occurs {count} times in {mutation.path}, not once"


def mutate(mutation: Mutation, root: Path) -> None:
    """Applies the mutation. Raises ValueError if `old` does not occur exactly once."""
    if found := problem(mutation, root):
        raise ValueError(found)
    path = root / mutation.path
    path.write_text(path.read_text().replace(mutation.old, mutation.new))


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """Copies the tracked files as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        yield root


def sources(root: Path) -> list[Path]:
    """Returns Python's path of the tree's packages: all folders `src`, and the stubs."""
    parts = sorted(path.parent for path in root.rglob("pyproject.toml") if path.parent != root)
    return [part / "src" if (part / "src").is_dir() else part for part in parts] + [root / "tests"]


def outcome(tests: Sequence[str], root: Path, seconds: float) -> tuple[int | None, str]:
    """Returns pytest's exit code, or None if it was ended, and its last output."""
    path = os.pathsep.join([*map(str, sources(root)), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"not within {seconds:g} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def check(mutation: Mutation, seconds: float) -> str:
    """Returns "caught", or the reason why the test did not catch the mutation."""
    with copy_of_the_tree() as root:
        mutate(mutation, root)
        code, told = outcome([mutation.test], root, seconds)
    if code == _FAILED or code is None:
        return "caught"
    return "SURVIVED" if code == _PASSED else f"NOT RUN (pytest ended with {code}): {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show them, and whether they can be applied; run nothing")
    parser.add_argument("-k", default="", metavar="PART", help="those with this in their test, path or text")
    parser.add_argument("--seconds", type=float, default=1000, help="limit for each test; one that hangs is caught")
    chosen = parser.parse_args()
    found = [mutation for mutation in mutations() if chosen.k in mutation.name]
    refused = [(mutation, problem(mutation)) for mutation in found if problem(mutation)]
    for mutation, why in refused:
        print(f"CANNOT BE APPLIED {mutation.name}: {why}")
    if chosen.list or refused or not found:
        print("\n".join(mutation.name for mutation in found) or f"no mutation has {chosen.k!r} in its name")
        return 1 if refused or not found else 0
    return 0 if run(found, chosen.seconds) else 1


def run(found: list[Mutation], seconds: float) -> bool:
    """Returns True if tests catch all mutations. Runs all tests once on the unchanged tree first."""
    tests = list(dict.fromkeys(mutation.test for mutation in found))
    with copy_of_the_tree() as root:
        code, told = outcome(tests, root, seconds * len(tests))
    if code != _PASSED:
        print(f"without any mutation a test fails:\n{told}")
        return False
    print(f"{len(tests)} tests pass without a mutation", flush=True)
    caught = 0
    for mutation in found:
        begin = time.monotonic()
        verdict = check(mutation, seconds)
        caught += verdict == "caught"
        print(f"{verdict:<8} {time.monotonic() - begin:5.0f} s  {mutation.name}", flush=True)
    print(f"{caught} of {len(found)} mutations are caught")
    return caught == len(found)


if __name__ == "__main__":
    sys.exit(main())
