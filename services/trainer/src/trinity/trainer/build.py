"""Building the parts of a trainer process, the same on every rank."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.config import Plan
from trinity.runtime import names
from trinity.runtime.errors import InvalidInput
from trinity.trainer.control import Control
from trinity.trainer.data.client import BufferClient
from trinity.trainer.ranks import Ranks
from trinity.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.weights.client import Rollback
    from trinity.trainer.weights.publisher import Publisher

_MEMORY = Path("/dev/shm")


def run_id_of(plan: Plan) -> str:
    return names.run_id(plan.config.project, plan.config.name, plan.config.group)


def weights_dir_of(plan: Plan, settings: TrainerSettings) -> Path:
    """The folder of whole versions. With sync_method memory it is removed when all steps are done."""
    if settings.weights_dir is not None:
        return settings.weights_dir
    if plan.config.synchronizer.sync_method != "memory":
        return plan.job_dir / "weights"
    if not _MEMORY.is_dir():
        raise InvalidInput("synchronizer.sync_method", f"is memory, and this machine has no {_MEMORY}; use checkpoint")
    return _MEMORY / f"trinity-{run_id_of(plan)}"


def train(plan: Plan, settings: TrainerSettings, ranks: Ranks, control: Control) -> None:
    """Load everything and run the loop; blocks until it ends. Heavy imports happen here."""
    import torch

    from trinity.config.devices import host_memory
    from trinity.trainer import devices
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.loop import TrainLoop
    from trinity.trainer.replay.bad_step import KeptStepLoop
    from trinity.trainer.replay.steps import Replay, ReplayLoop

    device = devices.choose(settings.device, ranks)
    if device == "cpu":
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // ranks.world_size))
    run = run_id_of(plan)
    try:
        engine = TrainEngine(plan, ranks, device)
    except torch.OutOfMemoryError as error:
        card = devices.card_of(torch.device("cuda", ranks.local_rank))
        raise devices.no_room(plan, ranks, card, host_memory(), error) from None
    buffer = publisher = None
    if ranks.is_first:
        buffer = BufferClient(settings.buffer_address, run)
        if not plan.offline and settings.replay_folder is None:
            publisher = make_publisher(plan, settings, engine)
    loop: TrainLoop
    if settings.replay_folder is not None and settings.replay_kept:
        loop = KeptStepLoop(plan, run, ranks, engine, control, settings.replay_kept, settings.replay_folder)
    elif settings.replay_folder is not None:
        replay = Replay(settings.replay_from, settings.replay_to, settings.replay_folder)
        loop = ReplayLoop(plan, run, ranks, engine, control, buffer, replay)
    else:
        loop = TrainLoop(plan, run, ranks, engine, control, buffer, publisher)
    try:
        loop.run()
    finally:
        if publisher is not None:
            publisher.close()
        if buffer is not None:
            buffer.close()
    engine.close()  # not after an error: other ranks may be in a collective, and end with this process


def make_publisher(plan: Plan, settings: TrainerSettings, engine: "TrainEngine") -> "Publisher":
    """For rank 0. Starts to claim the run."""
    from trinity.trainer.publishing import allowed_by
    from trinity.trainer.weights.claim import Claim
    from trinity.trainer.weights.client import SyncClient
    from trinity.trainer.weights.collective import CollectiveSender
    from trinity.trainer.weights.places import VersionStores
    from trinity.trainer.weights.publisher import Publisher
    from trinity.trainer.weights.verdicts import VerificationResults
    from trinity.weights.stores import open_store

    run, sync, folder = run_id_of(plan), plan.config.synchronizer, weights_dir_of(plan, settings)
    stores = [open_store(entry, run, folder=folder, nats_url=settings.nats_url) for entry in sync.storage]
    client = SyncClient(settings.sync_address, run)
    claim = Claim(client)
    claim.start()
    collective = None
    if sync.sync_method == "nccl":
        host = settings.collective_host or own_host(settings.sync_address)
        size = sync.bucket_mib * 1024**2
        collective = CollectiveSender(client.form_epoch, run, host, engine.device, size, sync.collective_timeout)

    def newest_rollback() -> "Rollback":
        claim.renew()
        return claim.rollback

    return Publisher(
        client,
        claim,
        VerificationResults(client, newest_rollback, sync.on_rejected == "stop", allowed_by(plan, engine)),
        VersionStores(folder, run, stores, sync.full_interval if engine.lora is None else 1, settings.nats_url),
        sync.versions_to_keep,
        removes_files=sync.sync_method == "memory",
        collective=collective,
        lora=engine.lora,
    )


def own_host(sync_address: str) -> str:
    """The address at which explorers reach this machine: the local one of the route to the sync service."""
    host, _, port = sync_address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect((host.strip("[]") or "127.0.0.1", int(port)))
        except (OSError, ValueError):
            return socket.gethostname()
        return str(probe.getsockname()[0])
