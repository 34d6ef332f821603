"""monitor: where metrics go beside the job folder."""

from typing import Any, Literal

from pydantic import Field

from trinity.config.schema.base import Section


class MonitorConfig(Section):
    """Two runs per job, `<name>_explorer` and `<name>_trainer`; the same lines are always in <job>/monitor/*.jsonl."""

    monitor_type: Literal["tensorboard", "wandb", "mlflow", "swanlab", "none"] = Field(
        "tensorboard", description="tensorboard, or an installed wandb, mlflow or swanlab; none: the job folder alone"
    )
    monitor_args: dict[str, Any] | None = Field(
        None,
        description="wandb: base_url, api_key; mlflow: uri, username, password. They are kept in the job folder's "
        "config.json; keys are safer in the environment (WANDB_API_KEY, ...)",
    )
    detailed_stats: bool = Field(False, description="Evaluations with mean, max, min and std over tasks as well")
