"""What the commands do, and how errors end them: one clear sentence, an exit code, never a traceback."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from trinity.cli.errors import RunError
from trinity.config import Config, ConfigError, expand, load, make_plan
from trinity.runtime.errors import TrinityError


def ending_well(action: Callable[[], int]) -> int:
    """2 for a configuration that cannot be used, 1 (or a RunError's own code) for a run that could not go on."""
    try:
        return action()
    except ConfigError as error:
        print(str(error), file=sys.stderr)
        return 2
    except (RunError, TrinityError, BaseExceptionGroup) as error:
        reason: BaseException = error
        while isinstance(reason, BaseExceptionGroup):
            reason = reason.exceptions[0]
        if not isinstance(reason, (RunError, TrinityError)):
            raise
        print(f"trinity: {reason}", file=sys.stderr)
        return reason.code if isinstance(reason, RunError) else 1
    except KeyboardInterrupt:  # before anything was started, or in a command that starts nothing
        print("trinity: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _say_notices(config: Config) -> None:
    for notice in config.notices:
        print(f"note: {notice}", file=sys.stderr)


def run_command(config: Path, overrides: list[str]) -> int:
    def action() -> int:
        from trinity.cli.join import join
        from trinity.cli.supervisor import run
        from trinity.runtime import logs

        loaded = load(config, overrides)
        logs.configure("run", level="ERROR")
        _say_notices(loaded)
        if loaded.mode == "explore":
            join(loaded, str(config))
        else:
            run(loaded, str(config))
        return 0

    return ending_well(action)


def check_command(config: Path, overrides: list[str], as_json: bool) -> int:
    def action() -> int:
        loaded = load(config, overrides)
        if as_json:
            print(json.dumps(json.loads(loaded.model_dump_json()), indent=1))
            return 0
        from trinity.cli.plan_text import describe

        for stage in expand(loaded):
            print(describe(make_plan(stage)))
        _say_notices(loaded)
        return 0

    return ending_well(action)


def status_command(config: Path | None, job: Path | None, as_json: bool) -> int:
    def action() -> int:
        from trinity.cli.status import collect, find_job, render

        folder = find_job(load(config) if config else None, job)
        found = asyncio.run(collect(folder))
        print(json.dumps(found, indent=1) if as_json else render(found))
        return 0

    return ending_well(action)
