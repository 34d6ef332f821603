"""Building the parts of a trainer process, the same on every rank."""

from pathlib import Path

from trinity.config import Plan
from trinity.runtime import names
from trinity.trainer.batches import BufferClient
from trinity.trainer.control import Control
from trinity.trainer.ranks import Ranks
from trinity.trainer.settings import TrainerSettings


def run_id_of(plan: Plan) -> str:
    return names.run_id(plan.config.project, plan.config.name, plan.config.group)


def weights_dir_of(plan: Plan, settings: TrainerSettings) -> Path:
    return settings.weights_dir or plan.job_dir / "weights"


def train(plan: Plan, settings: TrainerSettings, ranks: Ranks, control: Control) -> None:
    """Load everything and run the loop; blocks until it ends. Heavy imports happen here."""
    import torch

    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.loop import TrainLoop
    from trinity.trainer.replay import Replay, ReplayLoop
    from trinity.trainer.weights import Publisher

    device = settings.device if settings.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // ranks.world_size))
    run = run_id_of(plan)
    engine = TrainEngine(plan, ranks, device)
    buffer = publisher = None
    if ranks.is_first:
        buffer = BufferClient(settings.buffer_address, run)
        if not plan.offline and settings.replay_folder is None:
            publisher = Publisher(settings.sync_address, run, weights_dir_of(plan, settings))
    loop: TrainLoop
    if settings.replay_folder is not None:
        replay = Replay(settings.replay_from, settings.replay_to, settings.replay_folder)
        loop = ReplayLoop(plan, run, ranks, engine, control, buffer, replay)
    else:
        loop = TrainLoop(plan, run, ranks, engine, control, buffer, publisher)
    try:
        loop.run()
    finally:
        if buffer is not None:
            buffer.close()
        engine.close()
