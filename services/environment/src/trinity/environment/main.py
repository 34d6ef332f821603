"""trinity-environment: plays environments and scores answers."""

from trinity.environment.settings import EnvironmentSettings
from trinity.runtime.cli import service_app

app = service_app(
    "environment",
    "plays environments and scores answers",
    EnvironmentSettings,
    "trinity.environment.service:EnvironmentService",
)

if __name__ == "__main__":
    app()
