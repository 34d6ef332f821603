"""`trinity import-verl` on a script: its exit code, its YAML and what it says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity.import_verl import import_verl
from trinity.reading.errors import ending_well


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def at(self, path: str) -> Any:
        """The value at a dotted path, or "absent"."""
        value = yaml.safe_load(self.out)
        for part in path.split("."):
            if isinstance(value, list):
                value = value[int(part)]
            elif part in value:
                value = value[part]
            else:
                return "absent"
        return value

    def line(self, start: str) -> str:
        """The one line on stderr that begins like this."""
        (found,) = [line for line in self.err.splitlines() if line.startswith(start)]
        return found


class Importer:
    """Imports scripts, in a folder of the test."""

    def __init__(self, folder: Path, output: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._output = output

    def __call__(self, script: str) -> Result:
        path = self._folder / "run.sh"
        path.write_text(script)
        code = ending_well(lambda: import_verl(path, None))
        said = self._output.readouterr()
        return Result(code, said.out, said.err)

    def options(self, *given: str) -> Result:
        """A minimal script with these options."""
        return self("python3 -m verl.trainer.main_ppo " + " \\\n  ".join(given) + "\n")
