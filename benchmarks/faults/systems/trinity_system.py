"""Trinity, on the machine that the command runs on."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from systems.base import ROOT, Settings


class Trinity:
    name = "trinity"
    recovery = "`trinity run` restarts services; resumes from its newest checkpoint and the ledger; reproducible: true"

    def prepare(self, settings: Settings, folder: Path) -> None:
        values = {
            "project": "faults",
            "name": "run",
            "checkpoint_root_dir": str(folder / "jobs"),
            "reproducible": True,
            "model": {
                "model_path": str(settings.model),
                "max_prompt_tokens": 32,
                "max_response_tokens": settings.tokens,
            },
            "algorithm": {
                "algorithm_type": "grpo",
                "repeat_times": settings.group,
                "kl_loss_fn": "none",
                "optimizer": {"lr": 1e-4},
            },
            "buffer": {
                "batch_size": settings.tasks,
                "total_steps": settings.steps,
                "explorer_input": {
                    "taskset": {
                        "name": "rows",
                        "path": str(settings.data),
                        "split": "train",
                        "format": {"prompt_key": "question", "response_key": "answer"},
                        "default_workflow_type": "simple_workflow",
                        "default_reward_fn_type": "share_of_digits",
                    }
                },
            },
            "synchronizer": {"sync_interval": 1, "sync_offset": 1},
            "trainer": {
                "save_interval": settings.save_every,
                "max_checkpoints_to_keep": 2,
                "gradient_checkpointing": False,
                "shared_prompts": False,  # the auditor reads whole sequences
            },
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))

    def command(self, settings: Settings, folder: Path) -> Sequence[str]:
        plugins = ROOT / "benchmarks/faults/plugins"
        trinity = [sys.executable, "-m", "trinity.cli.main", "run"]
        return [*trinity, "--config", str(folder / "run.yaml"), "--plugin-dir", str(plugins)]

    def paths(self) -> Sequence[str]:
        return []
