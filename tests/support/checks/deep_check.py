"""`trinity check --deep` of a run with a taskset of four equal rows."""

import json
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from trinity.cli.main import app


def check(folder: Path, row: dict[str, Any], *overrides: str, **taskset: Any) -> tuple[int, str]:
    """Exit code and output. The job folder is `folder`/tests/job."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text("{}")
    (folder / "rows.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    columns = {"prompt_key": "question", "response_key": "answer"}
    dataset = {"name": "rows", "path": str(folder / "rows.jsonl"), "format": columns, **taskset}
    config = {
        "project": "tests",
        "name": "job",
        "checkpoint_root_dir": str(folder),
        "model": {"model_path": str(folder / "model"), "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 2, "total_epochs": 1, "explorer_input": {"taskset": dataset}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(app, ["check", "--deep", str(folder / "run.yaml"), *overrides])
    return done.exit_code, done.output


def play(environment: str, **args: Any) -> dict[str, Any]:
    """The check of a taskset with episodes."""
    rules = {"environment": environment, "environment_args": args}
    return {"default_workflow_type": "environment_workflow", "workflow_args": rules}
