"""trinity-tinker: takes the commands of tinker clients over HTTP."""

from trinity.runtime.cli import service_app
from trinity.tinker.settings import TinkerSettings

app = service_app(
    "tinker",
    "takes the commands of tinker clients over HTTP",
    TinkerSettings,
    "trinity.tinker.service:TinkerService",
)

if __name__ == "__main__":
    app()
