"""trinity-tenants: executes the commands of tenants that train adapters on one base model."""

from trinity.runtime.cli import service_app
from trinity.tinker.executor.settings import TenantsSettings

app = service_app(
    "tenants",
    "executes the commands of tenants that train adapters on one base model",
    TenantsSettings,
    "trinity.tinker.executor.service:TenantsService",
)

if __name__ == "__main__":
    app()
