"""`trinity explorers`: who rolls out for a run, with which weights, and how it gets them."""

import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.cli.commands.live import CALL_SECONDS, answer, live_services
from trinity.cli.commands.reader import JobStage
from trinity.cli.tail import visible
from trinity.cli.weight_text import Facts, error_text, member_facts, to_json
from trinity.runtime import rpc

_WIDTH = 140


def list_explorers(job_stage: JobStage, as_json: bool) -> str:
    """All explorers with a live lease, by name."""
    members = asyncio.run(_read(job_stage))
    found = [member_facts(member) for member in members]
    if as_json:
        return to_json(found)
    if not found:
        return f"{job_stage.name}: no explorers; mode explore of the same YAML starts one"
    return table(f"{job_stage.name}: {len(found)} explorer(s)", found)


async def _read(job_stage: JobStage) -> Sequence[pb.Member]:
    addresses = await live_services(job_stage)
    async with rpc.channel(addresses.sync) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        request = pb.ListMembersRequest(run=job_stage.run)
        return (await answer(stub.ListMembers(request, timeout=CALL_SECONDS), "sync")).members


def table(title: str, explorers: Sequence[Facts]) -> str:
    """A text table, one line for each explorer, and failures below it."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    drawn.add_column("name", overflow="fold")
    drawn.add_column("state", no_wrap=True)
    for column in ("version", "lag", "transport", "tokens/s", "pause", "canary", "reported"):
        drawn.add_column(column, justify="left" if column == "transport" else "right", no_wrap=True)
    drawn.add_column("host", overflow="fold")
    for one in explorers:
        serves = one["version"] >= 0
        cells = (
            one["name"],
            one["state"],
            str(one["version"]) if serves else "-",
            str(one["lag"]) if serves else "-",
            one["transport"] or "-",
            f"{one['tokens_per_second']:.0f}",
            f"{1000 * one['last_pause_seconds']:.0f} ms" if one["last_pause_seconds"] else "-",
            error_text(one["canary_max_error"]),
            f"{one['seconds_since_report']:.0f} s ago",
            f"{one['host']} (process {one['pid']})",
        )
        drawn.add_row(*(Text(visible(cell)) for cell in cells))
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(drawn)
    lines = [visible(title), *(line.rstrip() for line in capture.get().splitlines())]
    return "\n".join(lines + [f"{one['name']}: {visible(one['failure'])}" for one in explorers if one["failure"]])
