"""trinity-sampler: samples by the adapters of tenants."""

from trinity.runtime.cli import service_app
from trinity.tinker.sampler.settings import SamplerSettings

app = service_app(
    "sampler",
    "samples by the adapters of tenants",
    SamplerSettings,
    "trinity.tinker.sampler.service:SamplerService",
)

if __name__ == "__main__":
    app()
