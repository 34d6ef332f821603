"""trinity-tinker: takes the commands of tinker clients over HTTP."""

from trinity.runtime.cli import service_app
from trinity.tinker.gateway.settings import TinkerSettings

app = service_app(
    "tinker",
    "takes the commands of tinker clients over HTTP",
    TinkerSettings,
    "trinity.tinker.gateway.service:TinkerService",
)

if __name__ == "__main__":
    app()
