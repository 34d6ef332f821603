"""`trinity tinker`: several tenants train adapters on one base model, and sample, through the `tinker` client."""

from pathlib import Path

from trinity.commands import Arguments, ConfigOption, command, group
from trinity.reading.errors import RunError
from trinity.runtime import logs
from trinity.tinker.config import load_tinker
from trinity.tinker.processes import serve

app = group()


@command(app, "tinker")
def tinker(arguments: Arguments = None, config: ConfigOption = None) -> int:
    """Let tinker clients train adapters on one base model, and sample, until Ctrl-C. Resumes where it stopped."""
    given = list(arguments or [])
    if config is None and given and "=" not in given[0]:
        config = Path(given.pop(0))
    if config is None:
        raise RunError("no YAML; give it as --config FILE, as examples/tinker/quickstart.yaml", 2)
    loaded = load_tinker(config, given)
    logs.configure("run", level="ERROR")
    serve(loaded)
    return 0
