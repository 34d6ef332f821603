"""`trinity batch show`: the batch of an optimizer step, from the ledger and, for texts, the log.

The ledger entry comes from the buffer of the run, or from a read-only one. Texts always come from the read-only one: a
request for batches would tell the buffer of the run that a trainer wants the next step.
"""

from typing import Annotated

import typer

from trinity.commands import AsJson, command, group
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, any_buffer, ask, find_job_stage, read_only_buffer
from trinity.reading.render import table, to_json, visible, when
from trinity.reading.wire import Facts
from trinity.weights.checkpoints import complete_steps

_SHOWN_ROWS = 64

app = group("The batch of a step, from the ledger.")

Step = Annotated[int, typer.Argument(min=1, help="Optimizer step")]


@command(app, "show", find_job_stage)
def show_batch(
    job_stage: JobStage,
    step: Step,
    texts: Annotated[
        int, typer.Option("--texts", min=0, help="Show the prompt and at most this many responses of every group")
    ] = 0,
    as_json: AsJson = False,
) -> str:
    """Show the groups (or rows) that a step consumed, and the groups dropped before it."""
    if texts:
        batch = ask(read_only_buffer, job_stage, lambda reader: reader.buffer.entry_with_texts(step, texts))
    else:
        batch = ask(any_buffer, job_stage, lambda reader: reader.buffer.entry(step))
    return to_json(batch) if as_json else render(job_stage.name, batch)


@command(app, "skip", find_job_stage)
def skip_batch(
    job_stage: JobStage,
    step: Step,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is kept in the ledger")],
) -> str:
    """Pass a step that the trainer cannot learn from, when the run continues and in every replay."""
    # Of a run without folder here, its buffer knows which steps are learnt.
    newest = max(complete_steps(job_stage.folder), default=0) if job_stage.folders is not None else 0
    if step <= newest:
        raise RunError(
            f"step {step} is learnt: a checkpoint of step {newest} holds it; `trinity weights rollback` goes back"
        )
    entry = ask(any_buffer, job_stage, lambda reader: reader.buffer.skip(step, reason))
    what = f"step {step} is skipped ({visible(entry['skip_reason'])})"
    lost = f"its {len(entry['groups'])} groups are not trained"
    return f"{job_stage.name}: {what}; {lost}. `trinity run` with the same YAML continues"


def _kept(group: Facts) -> str:
    kept = str(group["kept"]) if group["kept"] == group["stored"] else f"{group['kept']} of {group['stored']}"
    return f"{kept}, {group['masked']} masked" if group["masked"] else kept


def _versions(group: Facts) -> str:
    oldest, newest = group["versions"]
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


_COLUMNS = {
    "task": lambda group: group["task_id"],
    "ordinal": lambda group: group["ordinal"],
    "kept": _kept,
    "reward": lambda group: f"{group['reward_mean']:.3f}",
    "weights": _versions,
    "stale": lambda group: group["staleness_steps"],
    "use": lambda group: group["use_count"],
    "tokens": lambda group: group["response_tokens"],
    "log": lambda group: group["log_sequence"],
}


def render(name: str, batch: Facts) -> str:
    """Returns a batch as text."""
    lines = [_title(name, batch)]
    if batch["groups"]:
        lines.append(table(batch["groups"], _COLUMNS))
    if batch["rows"]:
        lines.append(f"rows of the dataset: {_numbers(batch['rows'])}")
    for buffer in sorted({row["buffer"] for row in batch["auxiliary"]}):
        rows = [row["row"] for row in batch["auxiliary"] if row["buffer"] == buffer]
        lines.append(f"{len(rows)} rows of {visible(buffer)!r} in addition: {_numbers(rows)}")
    if batch["operators"]:
        lines.append(f"operators: {', '.join(batch['operators'])}")
    if batch["dropped"]:
        drops = (f"{d['ordinal']} ({visible(d['reason'])}, {d['response_tokens']} tokens)" for d in batch["dropped"])
        lines.append(f"dropped since the step before, by ordinal: {', '.join(drops)}")
    if batch["cut"]:
        tasks = (f"{one['ordinal']} ({visible(one['task_id'])})" for one in batch["cut"])
        lines.append(f"cut, as the step did not wait for them, by ordinal: {', '.join(tasks)}")
    lines += _written_texts(batch)
    return "\n".join(lines)


def _title(name: str, batch: Facts) -> str:
    what = f"{len(batch['rows'])} rows"
    if batch["groups"]:
        kept = sum(group["kept"] for group in batch["groups"])
        what = f"{len(batch['groups'])} groups, {kept} experiences, mean reward {batch['reward_mean']:.3f}"
    partial = "; partial: max_read_timeout was over" if batch["partial"] else ""
    partial += f"; skipped: {visible(batch['skip_reason'])}" if batch["skip_reason"] else ""
    return f"{name}, step {batch['step']}: {what}; {batch['policy']}, {when(batch['written_at_seconds'])}{partial}"


def _numbers(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
    return ", ".join(map(str, rows[:_SHOWN_ROWS])) + more


def _written_texts(batch: Facts) -> list[str]:
    lines: list[str] = []
    for one in batch["groups"]:
        for number, experience in enumerate(one.get("experiences", [])):
            if not number:
                lines += ["", f"--- {visible(one['task_id'])} ---", visible(experience["prompt"], layout=True)]
            reward = f"reward {experience['reward']:.3f}{', masked' if experience['masked'] else ''}"
            lines += [f"--- response {experience['index']}: {reward} ---"]
            lines += [visible(experience["response"], layout=True)]
    for example in batch.get("examples", []):
        lines += ["", f"--- row {example['row']} {visible(example['buffer'])}".rstrip() + " ---"]
        lines += [f"{visible(m['role'])}: {visible(m['content'], layout=True)}" for m in example["messages"]]
    return lines
