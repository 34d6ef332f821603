"""trinity-trainer: trains the policy with DeepSpeed."""

from trinity.runtime.cli import service_app
from trinity.trainer.settings import TrainerSettings

app = service_app(
    "trainer",
    "trains the policy with DeepSpeed",
    TrainerSettings,
    "trinity.trainer.service:make_service",
    "trinity.trainer.refused:refused",
)

if __name__ == "__main__":
    app()
