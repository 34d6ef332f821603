"""Ranks, the processes that train together, and their launch by rank 0.

Any launcher works that sets torchrun's variables. Without them rank 0 starts the other ranks as children. They end with
it, and it ends when a child ends. They meet in a file that only their user can read, and gloo listens on the loopback:
torch's store (MASTER_PORT) would listen on all interfaces, and accept data from any process.
"""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import structlog

from trinity.runtime.process import as_parent, loopback_interface

log = structlog.get_logger(__name__)

# While the others wait, rank 0 may write to a slow storage; torch's limit is ten minutes.
LONGEST_EXCHANGE = timedelta(hours=1)


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    local_rank: int
    init_method: str = "env://"  # argument of torch.distributed.init_process_group

    @property
    def meeting_place(self) -> str:
        """Describes the rendezvous of the ranks."""
        if self.init_method != "env://":
            return self.init_method
        return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')} (MASTER_ADDR, MASTER_PORT)"

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def ranks_from_environment(num_ranks: int) -> Ranks:
    """Returns this process's ranks; sets torchrun's variables if no launcher has."""
    if "RANK" not in os.environ:
        folder = tempfile.mkdtemp(prefix="trinity-ranks-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT="0",  # DeepSpeed requires them, and does not use them
            TRINITY_LAUNCHES_RANKS="1", TRINITY_RANKS_FILE=f"{folder}/store",
        )  # fmt: skip
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    elif (given := os.environ.get("NCCL_SOCKET_IFNAME")) in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", str(given)
        )  # the default follows the host's name, perhaps to the loopback
    method = f"file://{file}" if (file := os.environ.get("TRINITY_RANKS_FILE")) else "env://"
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")), method)


def launch_others(ranks: Ranks, on_death: Callable[[int, int], None]) -> list[subprocess.Popen[bytes]]:
    """Starts ranks 1, 2, ... as children unless a launcher did; calls on_death(rank, code) when one ends."""
    if not ranks.is_first or os.environ.get("TRINITY_LAUNCHES_RANKS") != "1":
        return []
    children = []
    for rank in range(1, ranks.world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TRINITY_LAUNCHES_RANKS": "0"}
        environment = {**os.environ, **as_parent(), **place}
        child = subprocess.Popen([sys.executable, "-m", "trinity.trainer.rank_main"], env=environment)
        children.append(child)
        threading.Thread(target=_watch, args=(child, rank, on_death), daemon=True, name=f"rank-{rank}").start()
    return children


def _watch(child: subprocess.Popen[bytes], rank: int, on_death: Callable[[int, int], None]) -> None:
    code = child.wait()
    log.info("trainer.rank.ended", rank=rank, pid=child.pid, code=code)
    on_death(rank, code)
