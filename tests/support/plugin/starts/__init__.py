"""Number of vLLM engines and trainers that tests start, child processes included. sitecustomize.py counts them."""

import os
import sys
from collections import Counter
from pathlib import Path

from support.plugin.starts.sitecustomize import FILE

Count = Counter[tuple[str, str]]  # (file of the test, "vLLM" or "trainer") -> starts


def count_into(file: Path) -> None:
    """Starts of this process, and of children with its environment, are noted in the file from now on."""
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)  # what forked.py tells its server
    folders = [here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    os.environ[FILE] = str(file)


def read(file: Path) -> Count:
    """The noted starts."""
    found: Count = Counter()
    for line in file.read_text().splitlines() if file.exists() else []:
        what, _, test = line.split("\t")
        found[test.partition("::")[0], what] += 1
    return found


def report(count: Count) -> list[str]:
    """The sum in a line, then the files with the most starts."""
    engines, trainers = (sum(n for (_, kind), n in count.items() if kind == what) for what in ("vLLM", "trainer"))
    lines = [f"engine starts: {engines} vLLM, {trainers} trainers"]
    for file in sorted({file for file, _ in count}, key=lambda f: (-count[f, "vLLM"] - count[f, "trainer"], f)):
        lines.append(f"{count[file, 'vLLM']:4} vLLM {count[file, 'trainer']:4} trainers  {file or 'in no test'}")
    return lines
