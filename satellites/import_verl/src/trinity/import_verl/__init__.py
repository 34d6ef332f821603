"""`trinity import-verl`: a shell script that runs veRL, as our YAML. docs/from_verl.md says what goes where."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trinity.commands import command, group
from trinity.import_verl.script import ScriptError, read_call
from trinity.import_verl.write import Imported, imported
from trinity.reading.errors import RunError

app = group()


@command(app, "import-verl")
def import_verl(
    script: Annotated[Path, typer.Argument(help="Script that runs verl.trainer.main_ppo")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The YAML; else standard output")] = None,
) -> int:
    """Write the YAML of what a veRL script runs."""
    try:
        call = read_call(script.read_text(encoding="utf-8"))
        found = imported(call, script.name)
    except FileNotFoundError:
        raise RunError(f"{script}: no such file", code=2) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{script}: cannot be read: {error}", code=2) from None
    except ScriptError as error:
        raise RunError(f"{script}: {error}", code=2) from None
    _tell(found)
    if not call.options:
        raise RunError(f"{script}: line {call.line}: no option of veRL can be read; no YAML was made")
    if output is None:
        sys.stdout.write(found.yaml)
        return 0
    try:
        _write(output, found.yaml)
    except OSError as error:
        raise RunError(f"{output}: cannot be written: {error}", code=2) from None
    return 0


def _write(output: Path, text: str) -> None:
    before = output.read_bytes() if output.exists() else None
    if before == text.encode():
        _say(f"{output} holds this already; nothing was written")
        return
    output.write_text(text, encoding="utf-8")
    done = "written" if before is None else "overwritten; it held something else"
    _say(f"{output}: {done}. See what it would do: trinity check --config {output}")


def _tell(found: Imported) -> None:
    for title, lines in (("not mapped", found.unmapped), ("not needed", found.unneeded), ("note", found.notes)):
        for line in lines:
            _say(f"{title}: {line}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
