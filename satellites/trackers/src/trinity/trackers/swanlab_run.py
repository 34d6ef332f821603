"""SwanLab, as far as it is alike: one run per project, group and name; SWANLAB_API_KEY holds."""

import os
from collections.abc import Mapping
from typing import Any

from trinity.runtime.monitor.options import MonitorOptions


class SwanlabRun:
    """Only the online mode takes a run up again. SwanLab has no second value for a step: the first one stays."""

    def __init__(self, options: MonitorOptions) -> None:
        import swanlab

        self._swanlab: Any = swanlab
        mode = options.args.get("mode") or os.environ.get("SWANLAB_MODE") or "online"
        chosen = {
            "project": options.project,
            "workspace": options.args.get("workspace"),
            "experiment_name": options.name,
            "group": options.group,
            "mode": mode,
            "logdir": str(options.args.get("logdir") or options.folder / "swanlab"),
            # Ids are 21 lower-case letters and digits.
            "id": options.digest[:21] if mode in ("online", "cloud") else None,
            "resume": "allow" if mode in ("online", "cloud") else None,
        }
        swanlab.init(config=options.public_config(), **{name: value for name, value in chosen.items() if value})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()
