"""The buffer's share of the trainer's time, in the asynchronous run of async_vs_sync.py.

    python benchmarks/gpu/buffer.py             two GPUs, about four minutes
    python benchmarks/gpu/buffer.py --folder F  the run that async_vs_sync.py --folder F left
    python benchmarks/gpu/buffer.py --cpu --tiny

The buffer's time begins when the last group of a batch is complete, or with the trainer's wait if that is later. It
ends when the trainer has the batch, so it includes log, ledger and stream, and the call that commits a checkpoint.
"""

import statistics

import async_vs_sync
import whole_run
from async_vs_sync import Measured
from buffer_table import Table

MOST = 0.01
_NAMES = {
    "wait": "waits for experience that is not there yet",
    "step": "trains",
    "publish": "publishes the weights",
    "save": "saves checkpoints",
}


def rows(found: Measured) -> list[tuple[str, ...]]:
    share = found.share("buffer")
    mark = "" if share <= MOST else " MISSED"
    return [
        _row("the buffer", found.parts["buffer"], share, f"<= {MOST:.0%}", f"{share / MOST:.2f}{mark}"),
        *(_row(name, found.parts[part], found.share(part)) for part, name in _NAMES.items()),
        _row("all of the time between steps", found.gaps, 1.0),
    ]


def _row(name: str, seconds: list[float], share: float, limit: str = "", ratio: str = "") -> tuple[str, ...]:
    figures = (1000 * statistics.fmean(seconds), 1000 * max(seconds))
    return name, *(f"{figure:,.1f}" for figure in figures), f"{share:.2%}", limit, ratio


def main() -> None:
    args = async_vs_sync.parsed(__doc__)
    with whole_run.working_folder(args.folder) as folder:
        found = async_vs_sync.play(args, folder, "async")
    Table(
        f"the trainer's time, {len(found.gaps)} steps of {args.tasks} x {args.group} responses, {args.size}",
        ("", "mean ms", "longest ms", "of the time", "limit", "of limit"),
        rows=rows(found),
    ).show()


if __name__ == "__main__":
    main()
