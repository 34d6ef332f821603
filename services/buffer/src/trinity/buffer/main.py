"""trinity-buffer: owns tasks, the experience log and the batch ledger."""

from trinity.buffer.settings import BufferSettings
from trinity.runtime.cli import service_app

app = service_app(
    "buffer",
    "owns tasks, the experience log and the batch ledger",
    BufferSettings,
    "trinity.buffer.service:BufferService",
)

if __name__ == "__main__":
    app()
