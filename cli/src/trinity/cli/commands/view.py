"""`trinity view`: the experiences a step was trained on, from <job>/[<stage>/]buffer/experience_buffer.jsonl.

The trainer appends one line per experience, steps in ascending order. After a crash steps are trained again and
appended again, so what counts is the last stretch of a step's lines, and in it the last line of a turn. The file may
be many GB: it is read from its end, and only lines of the step asked for are parsed. What models wrote may hold
terminal escapes and markup; none of it reaches the terminal as such.
"""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity.cli.errors import RunError
from trinity.cli.tail import lines_backwards, visible, whole_end

_NAME = Path("buffer", "experience_buffer.jsonl")
_STEP = re.compile(rb'\{"step": (-?\d+),')
_WIDTH = 120
_TEXTS = ("prompt", "response")

Row = dict[str, Any]


def view(folder: Path, step: int | None, index: int | None, task: str, as_json: bool) -> str:
    """Experiences of a step (None: the newest) as a table, or one of them whole, or as a JSON list.

    `task` leaves those whose task id contains it; numbers stay those of the whole step. RunError if there are none.
    """
    rows = list(enumerate(read_step(folder, step)))
    if index is not None:
        if not 0 <= index < len(rows):
            step = rows[0][1]["step"]
            raise RunError(f"no experience {index} in step {step}; there are 0 to {len(rows) - 1}")
        shown = [rows[index]]
    else:
        shown = [(number, row) for number, row in rows if task in str(row.get("task_id", ""))]
        if not shown:
            known = visible(str(rows[0][1].get("task_id", "")))
            raise RunError(f"no task id of step {rows[0][1]['step']} contains {task!r}; one of them is {known!r}")
    if as_json:  # DEL is the one control character JSON lets through
        return json.dumps([row for _, row in shown], indent=1).replace("\x7f", "\\u007f")
    return _table(shown, len(rows)) if index is None else _whole(shown[0][1], index, len(rows))


def find_file(folder: Path) -> Path:
    """The file of the stage that was trained last. RunError if no stage has one."""
    found = [path for path in (folder / _NAME, *folder.glob(f"*/{_NAME}")) if path.is_file()]
    if not found:
        raise _nothing_kept(folder)
    return max(found, key=lambda path: path.stat().st_mtime)


def read_step(folder: Path, step: int | None) -> list[Row]:
    """Experiences of a step in the order they were trained in. RunError if there are none."""
    steps: set[int] = set()
    rows: list[Row] = []
    with find_file(folder).open("rb", buffering=0) as file:
        for line in lines_backwards(file, whole_end(file)):
            match = _STEP.match(line)
            if match is None:
                continue
            number = int(match[1])
            if rows and number != step:
                break
            row = _parse(line) if step is None or number == step else None
            if row is not None:
                step = number
                rows.append(row)
            steps.add(number)
    if not steps or step is None:
        raise _nothing_kept(folder)
    if not rows:
        raise RunError(f"no experience of step {step}; there are steps {min(steps)} to {max(steps)}")
    return _last_of_each(reversed(rows))


def _parse(line: bytes) -> Row | None:
    """None for a line that a crash cut off and the next run continued."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _last_of_each(rows: Iterable[Row]) -> list[Row]:
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(str(row.get(name)) for name in ("task_id", "rollout", "turn"))
        found.pop(key, None)  # the order is that of the last time
        found[key] = row
    return list(found.values())


def _nothing_kept(folder: Path) -> RunError:
    return RunError(
        f"no experience is kept in {folder}; buffer.save_experiences is on by default and writes it as steps are "
        "trained"
    )


def _table(shown: list[tuple[int, Row]], total: int) -> str:
    rewards = [value for _, row in shown if isinstance(value := row.get("reward"), (int, float))]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    part = f"{len(shown)} of {total}" if len(shown) < total else str(total)
    width = shutil.get_terminal_size((_WIDTH, 24)).columns or _WIDTH
    title = Text(f"step {shown[0][1]['step']}: {part} experiences{mean}")
    table = Table(title=title, title_justify="left", expand=True, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("#", "task", "rollout", "reward", "advantage", "tokens", "weights", "stale", "truncated"):
        right = column in ("#", "rollout", "reward", "advantage", "stale")
        table.add_column(column, justify="right" if right else "left", no_wrap=right, overflow="fold")
    table.add_column("response", no_wrap=True, overflow="ellipsis", ratio=1, width=14)
    for number, row in shown:
        truncation = str(row.get("truncation", "none"))
        cells = (
            str(number),
            str(row.get("task_id", "")),
            str(row.get("rollout", "")),
            _decimal(row.get("reward")),
            _decimal(row.get("advantage")),
            f"{row.get('prompt_tokens', '?')}+{row.get('response_tokens', '?')}",
            versions(row.get("versions")),
            str(row.get("staleness", "")),
            "" if truncation == "none" else truncation,
            str(row.get("response", ""))[:width],
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))  # Text, not str: brackets are no markup
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


def _decimal(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def versions(value: Any) -> str:
    """Weights that sampled a response: "12", or which tokens by which as "11:0-57 12:57-80"; "-" for none."""
    if not isinstance(value, list) or not value:
        return "-"
    if len(value) == 1:
        return str(value[0][0])
    return " ".join(f"{version}:{first}-{end}" for version, first, end in value)


def _whole(row: Row, index: int, total: int) -> str:
    fields = {key: value for key, value in row.items() if key not in _TEXTS}
    width = max(len(visible(key)) for key in fields)
    lines = [f"experience {index} of {total}"]
    for key, value in fields.items():
        text = versions(value) if key == "versions" else value if isinstance(value, str) else json.dumps(value)
        lines.append(f"  {visible(key):<{width}}  {visible(text)}")
    for key in _TEXTS:
        lines += ["", f"--- {key}: {row.get(f'{key}_tokens', '?')} tokens ---"]
        lines.append(visible(str(row.get(key, "")), layout=True))
    return "\n".join(lines)
