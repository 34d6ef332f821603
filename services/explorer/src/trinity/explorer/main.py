"""trinity-explorer: rolls the policy out with vLLM."""

from trinity.explorer.settings import ExplorerSettings
from trinity.runtime.cli import service_app

app = service_app(
    "explorer",
    "rolls the policy out with vLLM",
    ExplorerSettings,
    "trinity.explorer.service:ExplorerService",
    "trinity.explorer.refused:refused",
)

if __name__ == "__main__":
    app()
