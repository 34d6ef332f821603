"""A rank that waits with others for what rank 0 finds late: `python -m support.waiting_ranks FOLDER PORT RANK`."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trinity.trainer.data.exchange import share_when_known
from trinity.trainer.ranks import Ranks

TIMEOUT_SECONDS, LATE_SECONDS = 3.0, 7.0


def main(folder: Path, port: int, rank: int) -> None:
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), 2, rank)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
    begin = time.monotonic()

    def look() -> bytes | None:
        time.sleep(0.5)
        return b"a batch" if time.monotonic() > begin + LATE_SECONDS else None

    found = share_when_known(look, Ranks(rank, 2, rank), torch.device("cpu"))
    (folder / f"{rank}").write_bytes(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
