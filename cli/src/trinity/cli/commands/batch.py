"""`trinity batch show`: what an optimizer step learnt from, out of the ledger and, for texts, the log.

The ledger entry comes from the run's buffer, or from a read-only one of this command. Texts always come from the
read-only one: a request for batches would tell the run's buffer that a trainer wants the next step.
"""

import asyncio
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.cli.commands.dead_letters import when
from trinity.cli.commands.reader import JobStage, Reader, answer, any_buffer, read_only_buffer
from trinity.cli.errors import RunError
from trinity.cli.tail import visible
from trinity.data.experience import Group
from trinity.data.wire import decode_outcome
from trinity.weights.checkpoints import complete_steps

_WIDTH = 140
_CALL_SECONDS = 60.0
_SHOWN_ROWS = 64

Batch = dict[str, Any]


def show_batch(job_stage: JobStage, step: int, texts: int, as_json: bool) -> str:
    """The batch of a step. `texts`: with prompt and this many responses of every group. RunError without an entry."""
    batch = asyncio.run(_read(job_stage, step, texts))
    if as_json:
        return json.dumps(batch, indent=1).replace("\x7f", "\\u007f")
    return render(job_stage.name, batch)


def skip_batch(job_stage: JobStage, step: int, reason: str) -> str:
    """What was written into the ledger. RunError if the step has no entry, or a checkpoint holds it."""
    newest = max(complete_steps(job_stage.folder), default=0)
    if step <= newest:
        raise RunError(f"step {step} is learnt: a checkpoint of step {newest} holds it; `trinity rollback` goes back")
    entry = asyncio.run(_skip(job_stage, step, reason))
    what = f"step {step} is skipped ({visible(entry.skip_reason)}); its {len(entry.groups)} groups are not trained"
    return f"{job_stage.name}: {what}. `trinity run` with the same YAML continues"


async def _skip(job_stage: JobStage, step: int, reason: str) -> pb.LedgerEntry:
    async with any_buffer(job_stage) as reader:
        request = pb.SkipStepRequest(run=job_stage.run, step=step, reason=reason)
        return (await answer(reader.stub.SkipStep(request, timeout=_CALL_SECONDS))).entry


async def _read(job_stage: JobStage, step: int, texts: int) -> Batch:
    async with read_only_buffer(job_stage) if texts else any_buffer(job_stage) as reader:
        request = pb.GetLedgerEntryRequest(run=job_stage.run, step=step)
        entry = (await answer(reader.stub.GetLedgerEntry(request, timeout=_CALL_SECONDS))).entry
        batch = describe(entry)
        if texts:
            await _add_texts(reader, entry, batch, texts)
    return batch


async def _add_texts(reader: Reader, entry: pb.LedgerEntry, batch: Batch, texts: int) -> None:
    """Add the first `texts` experiences of every group, and as many rows of datasets."""
    call = reader.stub.StreamBatches(pb.StreamBatchesRequest(run=entry.run, from_step=entry.step))
    members = iter(zip(entry.groups, batch["groups"], strict=True))
    batch["examples"] = []
    try:
        while (kind := (part := await answer(call.read())).WhichOneof("part")) != "end":
            if kind == "group":
                member, shown = next(members)
                shown["experiences"] = experiences(member, part.group.outcome)[:texts]
            elif kind == "example" and len(batch["examples"]) < texts:
                messages = json.loads(part.example.messages_json)
                row = {"buffer": part.example.buffer, "row": part.example.row, "messages": messages}
                batch["examples"].append(row)
    except RunError as error:
        raise RunError(f"{error}; the ledger's part of step {entry.step} is shown without --texts") from None
    finally:
        call.cancel()


def experiences(member: pb.LedgerGroup, outcome: bytes) -> list[Batch]:
    """The experiences of a group that the step trained on, after the operators."""
    group = decode_outcome(outcome)
    if not isinstance(group, Group):
        raise RunError(f"log entry {member.log_sequence} holds no group")
    masked = {kept.index: kept.masked for kept in member.experiences}
    indices = list(masked) or range(len(group.experiences))
    return [
        {
            "index": index,
            "rollout": experience.rollout,
            "reward": experience.reward,
            "masked": masked.get(index, False),
            "versions": [[span.version, span.start, span.end] for span in experience.version_spans],
            "truncation": experience.truncation.name.lower(),
            "prompt": experience.prompt_text,
            "response": experience.response_text,
        }
        for index, experience in zip(indices, group.as_kept(member.experiences).experiences, strict=True)
    ]


def describe(entry: pb.LedgerEntry) -> Batch:
    """A ledger entry, without the reader's cursor."""
    return {
        "run": entry.run,
        "step": entry.step,
        "policy": entry.policy,
        "partial": entry.partial,
        "skip_reason": entry.skip_reason,
        "written_at_seconds": entry.created_at_seconds,
        "reward_mean": entry.reward_mean,
        "operators": list(entry.operators),
        "groups": [_group(group) for group in entry.groups],
        "rows": list(entry.rows),
        "auxiliary": [{"buffer": row.buffer, "row": row.row} for row in entry.auxiliary],
        "dropped": [
            {
                "ordinal": group.ordinal,
                "log_sequence": group.log_sequence,
                "reason": group.reason,
                "response_tokens": group.num_response_tokens,
            }
            for group in entry.dropped
        ],
    }


def _group(group: pb.LedgerGroup) -> Batch:
    return {
        "task_id": group.task_id,
        "ordinal": group.ordinal,
        "log_sequence": group.log_sequence,
        "stored": group.num_experiences,
        "kept": len(group.experiences) or group.num_experiences,
        "masked": sum(kept.masked for kept in group.experiences),
        "reward_mean": group.reward_mean,
        "versions": [group.oldest_version, group.newest_version],
        "staleness_steps": group.staleness_steps,
        "use_count": group.use_count,
        "response_tokens": group.num_response_tokens,
    }


def render(name: str, batch: Batch) -> str:
    """A batch as text."""
    lines = [_title(name, batch)]
    if batch["groups"]:
        lines.append(_table(batch["groups"]))
    if batch["rows"]:
        lines.append(f"rows of the dataset: {_numbers(batch['rows'])}")
    for buffer in sorted({row["buffer"] for row in batch["auxiliary"]}):
        rows = [row["row"] for row in batch["auxiliary"] if row["buffer"] == buffer]
        lines.append(f"{len(rows)} rows of {visible(buffer)!r} beside them: {_numbers(rows)}")
    if batch["operators"]:
        lines.append(f"operators: {', '.join(batch['operators'])}")
    if batch["dropped"]:
        drops = (f"{d['ordinal']} ({visible(d['reason'])}, {d['response_tokens']} tokens)" for d in batch["dropped"])
        lines.append(f"dropped since the step before, by ordinal: {', '.join(drops)}")
    lines += _written_texts(batch)
    return "\n".join(lines)


def _title(name: str, batch: Batch) -> str:
    what = f"{len(batch['rows'])} rows"
    if batch["groups"]:
        kept = sum(group["kept"] for group in batch["groups"])
        what = f"{len(batch['groups'])} groups, {kept} experiences, mean reward {batch['reward_mean']:.3f}"
    partial = "; partial: max_read_timeout was over" if batch["partial"] else ""
    partial += f"; skipped: {visible(batch['skip_reason'])}" if batch["skip_reason"] else ""
    return f"{name}, step {batch['step']}: {what}; {batch['policy']}, {when(batch['written_at_seconds'])}{partial}"


def _table(groups: list[Batch]) -> str:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("task", overflow="fold")
    for column in ("ordinal", "kept", "reward", "weights", "stale", "use", "tokens", "log"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in groups:
        oldest, newest = group["versions"]
        kept = str(group["kept"]) if group["kept"] == group["stored"] else f"{group['kept']} of {group['stored']}"
        cells = (
            group["task_id"],
            str(group["ordinal"]),
            f"{kept}, {group['masked']} masked" if group["masked"] else kept,
            f"{group['reward_mean']:.3f}",
            str(oldest) if oldest == newest else f"{oldest}-{newest}",
            str(group["staleness_steps"]),
            str(group["use_count"]),
            str(group["response_tokens"]),
            str(group["log_sequence"]),
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _numbers(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
    return ", ".join(map(str, rows[:_SHOWN_ROWS])) + more


def _written_texts(batch: Batch) -> list[str]:
    lines: list[str] = []
    for group in batch["groups"]:
        for number, experience in enumerate(group.get("experiences", [])):
            if not number:
                lines += ["", f"--- {visible(group['task_id'])} ---", visible(experience["prompt"], layout=True)]
            reward = f"reward {experience['reward']:.3f}{', masked' if experience['masked'] else ''}"
            lines += [f"--- response {experience['index']}: {reward} ---"]
            lines += [visible(experience["response"], layout=True)]
    for example in batch.get("examples", []):
        lines += ["", f"--- row {example['row']} {visible(example['buffer'])}".rstrip() + " ---"]
        lines += [f"{visible(m['role'])}: {visible(m['content'], layout=True)}" for m in example["messages"]]
    return lines
