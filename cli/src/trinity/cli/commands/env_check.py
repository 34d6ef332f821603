"""The table of `trinity env check`."""

import json
from collections import Counter
from dataclasses import asdict

from trinity.sdk.conformance import Result, Sample, Verdict, check_provider


async def check(address: str, name: str, task: str, args: str, action: str, max_steps: int, as_json: bool) -> int:
    """Print each check as its result is known; the exit code."""
    results: list[Result] = []
    async for result in check_provider(address, Sample(task, args, action, max_steps), name):
        results.append(result)
        if not as_json:
            detail = f"  {result.detail}" if result.detail else ""
            print(f"{result.verdict:<8} {result.subject:<24} {result.check}{detail}", flush=True)
    counts = Counter(result.verdict for result in results)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        found = ", ".join(f"{counts[verdict]} {verdict.lower()}" for verdict in Verdict if counts[verdict])
        print(f"\n{address}: {found}")
    return 1 if counts[Verdict.FAILED] else 0
