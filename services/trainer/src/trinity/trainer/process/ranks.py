"""Ranks, the processes that train together, and their launch by rank 0 or by a further node.

Any launcher works that sets torchrun's variables. Without them each machine starts its own ranks as children. They end
with the process that started them, and it ends when a child ends. Ranks of one machine meet in a file that only their
user can read, and gloo listens on the loopback: torch's store (MASTER_PORT) would listen on all interfaces, and accept
data from any process. Ranks of several machines meet in a store that demands a secret (trinity.weights.group_store).
"""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import structlog

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.runtime.process import as_parent, is_suspended, loopback_interface
from trinity.runtime.spares import Spare

log = structlog.get_logger(__name__)

# While the others wait, rank 0 may write to a slow storage; torch's limit is ten minutes.
LONGEST_EXCHANGE = timedelta(hours=1)
_LOOK_SECONDS = 0.5
_RANK = [sys.executable, "-m", "trinity.trainer.rank_main"]
_spares: list[Spare] = []


@dataclass(frozen=True)
class Ranks:
    """One rank of a training group. local_*: on its machine; 0 as local_world_size: all ranks are on this one.

    store_file: file with address and secret of the store in which ranks of several machines meet.
    """

    rank: int
    world_size: int
    local_rank: int
    init_method: str = "env://"  # argument of torch.distributed.init_process_group
    local_world_size: int = 0
    store_file: Path | None = None

    @property
    def meeting_place(self) -> str:
        """Describes the rendezvous of the ranks."""
        if self.store_file is not None:
            return f"the store at {read_store(self.store_file)[0]}"
        if self.init_method != "env://":
            return self.init_method
        return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')} (MASTER_ADDR, MASTER_PORT)"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def here(self) -> int:
        """Number of ranks on this machine."""
        return self.local_world_size or self.world_size


def ranks_from_environment(num_ranks: int) -> Ranks:
    """Returns this process's ranks; sets torchrun's variables if no launcher has."""
    if "RANK" not in os.environ:
        os.environ["TRINITY_RANKS_FILE"] = str(_private_folder() / "store")
        _set_launch(0, num_ranks, num_ranks)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    elif (given := os.environ.get("NCCL_SOCKET_IFNAME")) in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", str(given)
        )  # the default follows the host's name, perhaps to the loopback
    method = f"file://{file}" if (file := os.environ.get("TRINITY_RANKS_FILE")) else "env://"
    local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    store = os.environ.get("TRINITY_RANKS_STORE")
    if "WORLD_SIZE" not in os.environ:
        raise InvalidInput("WORLD_SIZE", "is not set, but RANK is; set all of torchrun's variables, or unset RANK")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Ranks(rank, world_size, local, method, here, Path(store) if store else None)


def ranks_of_node(first: int, here: int, world_size: int, address: str, secret: str, interface: str) -> Ranks:
    """Returns the first of this machine's ranks in a group of several machines; sets the variables of all of them.

    `address`, `secret`: of the group's store. `interface`: where gloo and NCCL listen; empty leaves it to them.
    """
    store = _private_folder() / "store.json"
    files.write_json(store, {"address": address, "secret": secret}, mode=0o600)
    os.environ["TRINITY_RANKS_STORE"] = str(store)
    os.environ.pop("TRINITY_RANKS_FILE", None)
    _set_launch(first, here, world_size)
    if interface:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=f"={interface}")
    return ranks_from_environment(here)


def read_store(file: Path) -> tuple[str, str]:
    """Returns address and secret of a store."""
    found = files.read_json(file)
    if not isinstance(found, dict):
        raise FileNotFoundError(f"{file} names no store; its node has ended")
    return str(found["address"]), str(found["secret"])


def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="trinity-ranks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _set_launch(rank: int, here: int, world_size: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(here),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0",  # DeepSpeed requires them, and does not use them
        TRINITY_LAUNCHES_RANKS="1",
    )  # fmt: skip


def keep_spares(number: int) -> None:
    """Starts processes that import everything, for the next `launch`, until `number` of them wait."""
    while len(_spares) < number:
        _spares.append(Spare(_RANK, {**os.environ, **as_parent()}))


def launch_others(
    ranks: Ranks, on_death: Callable[[int, int], None], hung_seconds: float = 0.0
) -> list[subprocess.Popen[bytes]]:
    """Starts the further ranks of this machine as children unless a launcher did. See `launch`."""
    if os.environ.get("TRINITY_LAUNCHES_RANKS") != "1" or ranks.local_rank:
        return []
    return launch(ranks, range(1, ranks.here), on_death, hung_seconds)


def launch(
    ranks: Ranks, places: range, on_death: Callable[[int, int], None], hung_seconds: float
) -> list[subprocess.Popen[bytes]]:
    """Starts ranks of this machine as children, by their local ranks; calls on_death(rank, code) when one ends.

    Kills a child that a signal has stopped for `hung_seconds`; 0: never.
    """
    children = []
    for local in places:
        rank = ranks.rank - ranks.local_rank + local
        place = {"RANK": str(rank), "LOCAL_RANK": str(local), "TRINITY_LAUNCHES_RANKS": "0"}
        environment = {**os.environ, **as_parent(), **place}
        spare = _spares.pop().begin(environment) if _spares else None
        child = spare or subprocess.Popen(_RANK, env=environment)
        log.info("trainer.rank.started", rank=rank, pid=child.pid, spare=spare is not None)
        children.append(child)
        given = child, rank, on_death, hung_seconds
        threading.Thread(target=_watch, args=given, daemon=True, name=f"rank-{rank}").start()
    return children


def _watch(
    child: subprocess.Popen[bytes], rank: int, on_death: Callable[[int, int], None], hung_seconds: float
) -> None:
    moved = time.monotonic()
    while hung_seconds:
        try:
            child.wait(_LOOK_SECONDS)
            break
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            moved = moved if is_suspended(child.pid) else now
            if now - moved > hung_seconds:
                log.error("trainer.rank.hangs", rank=rank, pid=child.pid, seconds=round(now - moved, 1))
                child.kill()
                break
    code = child.wait()
    log.info("trainer.rank.ended", rank=rank, pid=child.pid, code=code)
    on_death(rank, code)
