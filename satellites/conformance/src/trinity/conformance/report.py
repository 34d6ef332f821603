"""The table of `trinity env check`."""

from collections import Counter
from collections.abc import Callable

import grpc.aio

from trinity.conformance.episodes import Sample
from trinity.conformance.result import Result, Verdict
from trinity.conformance.suite import check_provider


async def report(
    address: str, sample: Sample, only: str, channel: Callable[[], grpc.aio.Channel], *, quiet: bool
) -> list[Result]:
    """Prints each result as it is known, and how many there are of each verdict. Returns all results."""
    results: list[Result] = []
    async for result in check_provider(address, sample, only, channel()):
        results.append(result)
        if not quiet:
            detail = f"  {result.detail}" if result.detail else ""
            print(f"{result.verdict:<8} {result.subject:<24} {result.check}{detail}", flush=True)
    if not quiet:
        counts = Counter(result.verdict for result in results)
        found = ", ".join(f"{counts[verdict]} {verdict.lower()}" for verdict in Verdict if counts[verdict])
        print(f"\n{address}: {found}")
    return results
