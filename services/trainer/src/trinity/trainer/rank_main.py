"""Main of ranks other than rank 0: only the training loop. The process ends with rank 0, its parent."""

from trinity.config.service import load_plan
from trinity.runtime import broker, log_stream, logs, process, spares
from trinity.runtime.settings import load_settings
from trinity.runtime.torch_builds import hide_unusable_companions
from trinity.trainer.build import load_code, run_id_of, train
from trinity.trainer.process.control import Control
from trinity.trainer.process.ranks import ranks_from_environment
from trinity.trainer.settings import TrainerSettings


def main() -> None:
    process.die_with_parent()
    settings = load_settings(TrainerSettings)
    ranks = ranks_from_environment(settings.num_ranks)
    file = settings.log_file
    logs.configure(
        f"trainer-{ranks.rank}",
        level=settings.log_level,
        file=file.with_name(f"{file.stem}_rank_{ranks.rank}{file.suffix}") if file else None,
        mib=settings.log_mib,
    )
    broker.configure(settings.nats_creds, settings.nats_ca)
    plan = load_plan(settings.config_file, settings.stage, settings.plugin_dirs, needs_algorithm=True)
    log_stream.start(settings, "trainer", run_id_of(plan), f"trainer/{ranks.rank}")
    try:
        train(plan, settings, ranks, Control())
    finally:
        log_stream.stop()
    process.end(0)


if __name__ == "__main__":
    hide_unusable_companions()
    spares.wait(lambda: load_code(load_settings(TrainerSettings)))
    main()
