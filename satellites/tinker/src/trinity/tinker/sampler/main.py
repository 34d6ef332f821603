"""trinity-sampler: samples by the adapters of tenants."""

from trinity.explorer.sampler.settings import SamplerSettings
from trinity.runtime.cli import service_app

app = service_app(
    "sampler",
    "samples by the adapters of tenants",
    SamplerSettings,
    "trinity.explorer.sampler.service:SamplerService",
)

if __name__ == "__main__":
    app()
