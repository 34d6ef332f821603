"""A rank that waits for a late finding of rank 0: `python -m support.programs.trainer.waiting_ranks FOLDER`."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trinity.trainer.process.exchange import Exchange
from trinity.trainer.process.ranks import ranks_from_environment

TIMEOUT_SECONDS, LATE_SECONDS = 3.0, 7.0


def main(folder: Path) -> None:
    ranks = ranks_from_environment(2)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    begin = time.monotonic()

    def poll() -> bytes | None:
        time.sleep(0.5)
        return b"a batch" if time.monotonic() > begin + LATE_SECONDS else None

    found = Exchange(ranks, timeout).share_when_known(poll, bytes, bytes)
    (folder / f"{ranks.rank}").write_bytes(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
