"""Ranks that work long, and of which one then hangs: `python -m support.programs.trainer.hanging_ranks FOLDER`.

Rank 0 looks at their common work as the service does, and writes what stands still.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trinity.trainer.process.control import Control
from trinity.trainer.process.exchange import Exchange
from trinity.trainer.process.ranks import LONGEST_EXCHANGE, ranks_from_environment

LOOK_SECONDS, LOOKS, WORK_SECONDS, HANG_SECONDS = 0.1, 25, 6.0, 45.0


def watch(control: Control, folder: Path) -> None:
    while not (what := control.look(LOOKS)):
        time.sleep(LOOK_SECONDS)
    (folder / "found").write_text(what)
    os._exit(0)


def main(folder: Path) -> None:
    ranks, control = ranks_from_environment(2), Control()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    exchange = Exchange(ranks, LONGEST_EXCHANGE, control.together)
    exchange.barrier()
    if ranks.is_first:
        threading.Thread(target=watch, args=(control, folder), daemon=True).start()

    def work() -> int:
        time.sleep(ranks.rank * WORK_SECONDS)
        return ranks.rank

    (folder / str(ranks.rank)).write_text(str(exchange.collect_when_done(work)))
    deadline = time.monotonic() + HANG_SECONDS
    while not ranks.is_first and not (folder / "found").exists() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if ranks.is_first:
        exchange.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
