"""Main of every rank but the first: the training loop alone. It ends with rank 0, its parent."""

from trinity.config.service import load_plan
from trinity.runtime import logs, process
from trinity.runtime.settings import load_settings
from trinity.runtime.torch_builds import hide_unusable_companions
from trinity.trainer.build import train
from trinity.trainer.control import Control
from trinity.trainer.ranks import ranks_from_environment
from trinity.trainer.settings import TrainerSettings


def main() -> None:
    process.die_with_parent()
    hide_unusable_companions()
    settings = load_settings(TrainerSettings)
    ranks = ranks_from_environment(settings.num_ranks)
    file = settings.log_file
    logs.configure(
        f"trainer-{ranks.rank}",
        level=settings.log_level,
        file=file.with_name(f"{file.stem}_rank_{ranks.rank}{file.suffix}") if file else None,
    )
    train(load_plan(settings.config_file, settings.stage), settings, ranks, Control())
    process.end(0)


if __name__ == "__main__":
    main()
