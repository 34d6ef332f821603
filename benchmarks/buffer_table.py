"""Helpers of all parts: a table of figures with limits, and a precise wait for processes."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field

from support.servers.service import ServiceProcess
from trinity.runtime.process import is_alive


@dataclass
class Table:
    title: str
    columns: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def show(self) -> None:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        print(f"\n{self.title}")
        for note in self.notes:
            print(f"({note})")
        for line in lines:
            first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join((first.strip().ljust(widths[0]), *others)).rstrip(), flush=True)


def at_most(figure: float, limit: float) -> str:
    """The limit, and whether the figure keeps it."""
    return f"{limit:g}" if figure <= limit else f"{limit:g} MISSED"


def at_least(figure: float, limit: float) -> str:
    return f"{limit:g}" if figure >= limit else f"{limit:g} MISSED"


def percentile(values: Iterable[float], part: float) -> float:
    """The quantile by nearest rank: 0.99 of 100 values is the second largest."""
    ordered = sorted(values)
    return ordered[math.ceil(part * len(ordered)) - 1]


async def until_serving(*processes: ServiceProcess) -> None:
    """Wait until all are SERVING. Calls gRPC only on open ports, since a refused channel retries after a second."""
    for process in processes:
        host, port = process.address.split(":")
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), timeout=1).close()
                break
            assert is_alive(process.pid), process.tail()
            await asyncio.sleep(0.01)
        await asyncio.to_thread(process.wait_serving, 600.0)
