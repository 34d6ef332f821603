"""trinity-sync: versions weights and keeps the membership of explorers."""

from trinity.sync.settings import SyncSettings
from trinity.runtime.cli import service_app

app = service_app("sync", "versions weights and keeps the membership of explorers", SyncSettings, "trinity.sync.service:SyncService")

if __name__ == "__main__":
    app()
