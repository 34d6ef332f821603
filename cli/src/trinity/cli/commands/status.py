"""`trinity status`: every process of a live run, with its health and the weights it serves."""

import asyncio
from pathlib import Path
from typing import Any

from trinity.commands import AsJson, command, group
from trinity.reading import job as jobs
from trinity.reading.find import AnnouncedRun, find_run
from trinity.reading.render import error_text, losses_text, table, to_json, visible

app = group()


@command(app, "status", find_run)
def status(place: Path | AnnouncedRun, as_json: AsJson = False) -> str:
    """Show the processes of a live run, or how a finished one ended. Without options: the newest one here."""
    if isinstance(place, Path) and not jobs.read_records(place):
        summary = jobs.describe_finished(place)
        return to_json(summary) if as_json else render_finished(place, summary)
    from trinity.reading.status import collect, collect_announced  # with gRPC, which takes a while

    found = asyncio.run(collect(place) if isinstance(place, Path) else collect_announced(place))
    return to_json(found) if as_json else render(found)


def render_finished(folder: Path, found: dict[str, Any]) -> str:
    """Returns the state of a run without a process here as text."""
    is_live = found["state"] == "live"
    lines = [f"{folder}: {found['state']}, no process lives{' on this machine' if is_live else ''}"]
    if found["reason"] is not None:
        lines.append(visible(f"  {found['reason']}", layout=True))
    if found["state"] != "finished" and (trained := found["trained"]):
        of = f" of {trained['last_step']}" if trained["last_step"] is not None else ""
        stage = f" of stage {trained['stage']}" if trained["stage"] else ""
        lines.append(visible(f"  trained step {trained['step']}{of}{stage}"))
    for name, steps in found["checkpoints"].items():
        lines.append(f"  {name if name != '.' else 'checkpoints'}: global_step_{', '.join(map(str, steps))}")
    summary = found["summary"] or {}
    for key in ("steps", "reward_first", "reward_last", "eval_before", "eval_after", "wall_seconds"):
        if summary.get(key) is not None:
            value = summary[key]
            lines.append(visible(f"  {key}: {value:.3f}" if isinstance(value, float) else f"  {key}: {value}"))
    if found["state"] in ("failed", "stopped"):
        lines.append("  `trinity run` with the same YAML resumes it")
    return "\n".join(lines)


_COLUMNS = {
    "name": lambda one: one["name"],
    "pid": lambda one: one["pid"] or "-",
    "address": lambda one: one["address"],
    "health": lambda one: one["health"],
    "weights": lambda one: "-" if one["weight_version"] is None else one["weight_version"],
    "restarts": lambda one: "-" if one["restarts"] is None else one["restarts"],
}


def render(found: dict[str, Any]) -> str:
    """Returns the state of a live run as text."""
    part = found["stage"] or ("" if found["mode"] in ("both", "train") else f"mode {found['mode']}")
    title = visible(f"{found['job'] or found['run']}" + (f" ({part})" if part else ""))
    lines = [title, table(found["processes"], _COLUMNS)]
    if found["trainer_state"] is not None:
        step = f"step {found['step']}/{found['last_step']} ({found['trainer_state']}) {visible(found['waiting_for'])}"
        lines.append(step.rstrip())
    if nodes := found.get("nodes"):
        each = ", ".join(f"{visible(one['name'])} ({one['ranks']} rank(s))" for one in nodes)
        lines.append(f"the trainer has {len(nodes)} machine(s): {each}")
    lines += losses_text(found.get("losses", []))
    groups = found.get("groups") or {}
    if moved := groups.get("moved_episodes"):
        lines.append(f"{moved} episodes were continued by another explorer")
    if cut := groups.get("cut_tasks"):
        late = groups["late_groups"]
        lines.append(f"{cut} of {groups['fed']} tasks were cut, as their step did not wait; groups of {late} came late")
    return "\n".join([*lines, *_about_alarms(found), *_about_weights(found)])


def _about_alarms(found: dict[str, Any]) -> list[str]:
    """Returns a line for each alarm, with its fix."""
    return [visible(f"{one['text']} ({one['fix']})") for one in found["alarms"]]


def _about_weights(found: dict[str, Any]) -> list[str]:
    """Returns a line for the versions, and one for each explorer."""
    lines = []
    if found["weights"] is not None:
        live = found["weights"]["live"]
        lines.append("weights: nothing LIVE yet" if live is None else f"weights: version {live} LIVE")
        for one in found["weights"]["newer"]:
            lines[0] += f"; {one['version']} {one['state']}" + (f" ({one['reason']})" if one["reason"] else "")
    for one in found["explorers"]:
        behind = f", {one['lag']} behind" if one["lag"] else ""
        by = f" by {one['transport']}" if one["transport"] else ""
        canary = f", canary {error_text(one['canary_max_error'])}" if one["canary_max_error"] != 0 else ""
        failure = f"; {one['failure']}" if one["failure"] else ""
        serves = f"version {one['version']}{by}{behind}{canary}" if one["version"] >= 0 else "nothing served yet"
        lines.append(f"{one['name']}: {one['state']}, {serves}, {one['tokens_per_second']:.0f} tokens/s{failure}")
    return [visible(line) for line in lines]
