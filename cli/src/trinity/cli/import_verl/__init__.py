"""`trinity import-verl`: a shell script that runs veRL, as our YAML. docs/from_verl.md says what goes where."""

import sys
from pathlib import Path

from trinity.cli.import_verl.script import ScriptError, read_call
from trinity.cli.import_verl.write import Imported, imported

__all__ = ["import_verl_command"]


def import_verl_command(script: Path, output: Path | None) -> int:
    """Write the run of a script as YAML, to `output` or to stdout. Notes go to stderr.

    Returns 0, or 2 for a script that cannot be read, has no run, or for a file that cannot be written.
    """
    try:
        text = script.read_text(encoding="utf-8")
    except FileNotFoundError:
        return _refuse(f"{script}: no such file")
    except (OSError, UnicodeDecodeError) as error:
        return _refuse(f"{script}: cannot be read: {error}")
    try:
        found = imported(read_call(text), script.name)
    except ScriptError as error:
        return _refuse(f"{script}: {error}")
    _tell(found)
    if output is None:
        sys.stdout.write(found.yaml)
        return 0
    try:
        return _write(output, found.yaml)
    except (OSError, UnicodeDecodeError) as error:
        return _refuse(f"{output}: cannot be written: {error}")


def _write(output: Path, text: str) -> int:
    before = output.read_bytes() if output.exists() else None
    if before == text.encode():
        _say(f"{output} holds this already; nothing was written")
        return 0
    output.write_text(text, encoding="utf-8")
    done = "written" if before is None else "overwritten; it held something else"
    _say(f"{output}: {done}. See what it would do: trinity check --config {output}")
    return 0


def _tell(found: Imported) -> None:
    for title, lines in (("not mapped", found.unmapped), ("not needed", found.unneeded), ("note", found.notes)):
        for line in lines:
            _say(f"{title}: {line}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _refuse(reason: str) -> int:
    _say(reason)
    return 2
