"""The last lines of a stage and of a run: what changed, where the model is, and what to do with it."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trinity.cli.supervise.stage.progress import clock
from trinity.reading.render import near, visible
from trinity.weights.checkpoints import newest_model


def closing(part: dict[str, Any]) -> str:
    """Returns a stage's result in a line: steps, time, accuracy and reward before and after."""
    shown = [f"{part.get('steps', 0)} steps in {clock(part.get('wall_seconds') or 0.0)}", *_changes(part)]
    return ", ".join(shown)


def last_lines(job: Path, stage_folder: Path | None, summary: dict[str, Any]) -> Iterable[str]:
    """Yields the lines that end a run: results, model, and three commands."""
    changes = ", ".join(_changes(summary)) or "no evaluation"
    yield visible(f"the run is finished in {clock(summary.get('wall_seconds') or 0.0)}: {changes}")
    found = newest_model(stage_folder) if stage_folder is not None else None
    if found is not None:
        yield visible(f"model: {near(found[1])} (step {found[0]})")
    yield f"summary: {near(job / 'summary.json')}"
    yield "next:"
    yield f"  trinity ui --job {shlex.quote(near(job))}    # curves, samples, tokens"
    yield f"  trinity serve --job {shlex.quote(near(job))}    # an OpenAI-compatible endpoint"
    if stage_folder is not None:
        yield f"  trinity convert --checkpoint-dir {shlex.quote(near(stage_folder))}    # Hugging Face folders"


def _changes(part: dict[str, Any]) -> list[str]:
    """Returns "accuracy 0.412 -> 0.871 of sums-test" and the like."""
    names = {str(one["taskset"]) for one in part.get("evaluations", ())}
    of = f" of {', '.join(sorted(names))}" if names else ""
    texts = []
    for name, first, last, what in (
        ("accuracy", "eval_before", "eval_after", of),
        ("reward", "reward_first", "reward_last", ""),
    ):
        before, after = part.get(first), part.get(last)
        if after is not None:
            change = f"{before:.3f} -> {after:.3f}" if before is not None else f"{after:.3f}"
            texts.append(visible(f"{name} {change}{what}"))
    return texts
