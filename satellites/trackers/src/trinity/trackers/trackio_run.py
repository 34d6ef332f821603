"""Trackio, the default of TRL: one run per project, group and name, in a database that `trackio show` reads."""

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from trinity.runtime.monitor.options import MonitorOptions


class TrackioRun:
    """On this machine in TRACKIO_DIR, else in <folder>/trackio; `args.space_id` or `args.server_url` send it elsewhere.

    A step trained again after a crash stands there twice: Trackio has no way to remove a point.
    """

    def __init__(self, options: MonitorOptions) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(options.folder.absolute() / "trackio"))  # read by the import
        import trackio

        chosen = {name: options.args.get(name) or None for name in ("space_id", "server_url", "private")}
        with redirect_stdout(io.StringIO()):  # the service has its own log
            self._run: Any = trackio.init(
                options.project,
                name=options.name,
                group=options.group or None,
                config=options.public_config(),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                **chosen,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()
