"""Weights & Biases: one run per project, group and name, taken up again after a restart."""

import re
from collections.abc import Mapping
from typing import Any

from trinity.runtime.monitor.guard import CLOSE_SECONDS
from trinity.runtime.monitor.options import MonitorOptions


class WandbRun:
    """wandb's own environment variables hold (WANDB_MODE, WANDB_API_KEY, ...); its files are in <folder>/wandb.

    wandb drops a step smaller than the last one. After a crash steps come again, so `step` is a metric like others and
    the x axis of all; a chart then shows the repeated steps twice.
    """

    def __init__(self, options: MonitorOptions) -> None:
        import wandb

        args = options.args
        settings: dict[str, Any] = {
            "console": "off",  # the service has its own log
            "disable_git": True,
            # The key is for this process: wandb.login would write it to ~/.netrc.
            "api_key": args.get("api_key") or None,
            "base_url": args.get("base_url") or None,
            # wandb stops retrying soon and `Background` tries again: the process cannot end while wandb retries.
            # History has its own retries.
            "x_graphql_retry_max": 2,
            "x_graphql_timeout_seconds": 10,
            "finish_timeout": CLOSE_SECONDS - 2,  # at the end of the process too; unsent values stay on disk
        }
        known = {name: value for name, value in settings.items() if value and name in wandb.Settings.model_fields}
        tags = args.get("tags") or None
        self._run = wandb.init(
            project=options.project,
            group=options.group or None,
            name=options.name,
            id=run_id(options),
            resume="allow",
            reinit="create_new",
            job_type=options.role,
            dir=options.folder,
            config=options.public_config(),
            allow_val_change=True,
            entity=args.get("entity") or None,
            tags=tags.split(",") if isinstance(tags, str) else tags,
            notes=args.get("notes") or None,
            settings=wandb.Settings(**known),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


def run_id(options: MonitorOptions) -> str:
    """The name, readable, and a digest of what tells runs apart; letters, digits and dashes."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', options.name).strip('-')[:60]}-{options.digest[:12]}"
