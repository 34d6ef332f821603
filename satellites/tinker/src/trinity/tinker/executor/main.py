"""trinity-tenants: executes the commands of tenants that train adapters on one base model."""

from trinity.runtime.cli import service_app
from trinity.trainer.tenants.settings import TenantsSettings

app = service_app(
    "tenants",
    "executes the commands of tenants that train adapters on one base model",
    TenantsSettings,
    "trinity.trainer.tenants.service:TenantsService",
)

if __name__ == "__main__":
    app()
