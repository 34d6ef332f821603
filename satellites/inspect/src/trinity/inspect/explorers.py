"""`trinity explorers`: the explorers of a run, their weights and transports."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trinity.commands import AsJson, command, group
from trinity.reading.job import read_records
from trinity.reading.reader import JobStage, ask, find_job_stage, live_sync
from trinity.reading.render import error_text, table, to_json, visible
from trinity.reading.tail import lines_backwards, whole_end
from trinity.runtime import files, waits

app = group()

_COLUMNS = {
    "name": lambda one: one.name,
    "state": lambda one: one.state,
    "version": lambda one: one.version if one.version >= 0 else "-",
    "lag": lambda one: one.lag if one.version >= 0 else "-",
    "transport": lambda one: one.transport or "-",
    "tokens/s": lambda one: round(one.tokens_per_second),
    "pause": lambda one: f"{1000 * one.last_pause_seconds:.0f} ms" if one.last_pause_seconds else "-",
    "canary": lambda one: error_text(one.canary_max_error),
    "reported": lambda one: f"{one.seconds_since_report:.0f} s ago",
    "host": lambda one: f"{one.host} (process {one.pid})",
}


def _starting(job_stage: JobStage) -> Iterator[str]:
    """Yields what each explorer of this machine that has not joined yet does."""
    records = read_records(job_stage.job) if job_stage.folders is not None else {}
    for process in (one for record in records.values() for one in record.processes if one.service == "explorer"):
        does = "starts"
        with contextlib.suppress(OSError), Path(process.log).open("rb", buffering=0) as file:
            for entry in files.json_lines(lines_backwards(file, whole_end(file))):
                if entry.get("event") in (waits.PHASE, "service.started"):
                    does = str(entry.get("phase", does))
                    break
        yield f"{process.name} {does}"


@command(app, "explorers", find_job_stage)
def list_explorers(job_stage: JobStage, as_json: AsJson = False) -> str:
    """List the explorers of a live run: state, weights, lag, tokens a second, how weights reach them."""
    found = ask(live_sync, job_stage, lambda sync: sync.members())
    if as_json:
        return to_json(found)
    if not found:
        starting = "; ".join(_starting(job_stage))
        rest = (
            f"no explorer serves yet: {starting}"
            if starting
            else "no explorers; mode explore of the same YAML starts one"
        )
        return visible(f"{job_stage.name}: {rest}")
    failures = [f"{one.name}: {visible(one.failure)}" for one in found if one.failure]
    return "\n".join([visible(f"{job_stage.name}: {len(found)} explorer(s)"), table(found, _COLUMNS), *failures])
