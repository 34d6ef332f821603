"""trinity-trainer: trains the policy with DeepSpeed."""

from trinity.runtime import spares
from trinity.runtime.cli import service_app
from trinity.runtime.settings import load_settings
from trinity.trainer.settings import TrainerSettings

app = service_app(
    "trainer",
    "trains the policy with DeepSpeed",
    TrainerSettings,
    "trinity.trainer.service:make_service",
    "trinity.trainer.refused:refused",
)


def _load() -> None:
    """Loads what this process and its further ranks need."""
    from trinity.trainer.build import load_code
    from trinity.trainer.process.ranks import keep_spares

    settings = load_settings(TrainerSettings)
    keep_spares(settings.num_ranks - 1)
    load_code(settings)


if __name__ == "__main__":
    spares.wait(_load)
    app()
