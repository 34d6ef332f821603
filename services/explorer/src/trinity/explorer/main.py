"""trinity-explorer: rolls the policy out with vLLM."""

from trinity.explorer.settings import ExplorerSettings
from trinity.runtime import spares
from trinity.runtime.cli import service_app

app = service_app(
    "explorer",
    "rolls the policy out with vLLM",
    ExplorerSettings,
    "trinity.explorer.service:ExplorerService",
    "trinity.explorer.refused:refused",
)


def _load() -> None:
    """Loads the code of the service and of its engines."""
    import vllm.engine.arg_utils
    import vllm.v1.engine.async_llm  # noqa: F401

    import trinity.explorer.service  # noqa: F401


if __name__ == "__main__":
    spares.wait(_load)
    app()
