"""trinity-sync: versions weights and keeps the membership of explorers."""

from trinity.runtime.cli import service_app
from trinity.sync.settings import SyncSettings

app = service_app(
    "sync", "versions weights and keeps the membership of explorers", SyncSettings, "trinity.sync.service:SyncService"
)

if __name__ == "__main__":
    app()
