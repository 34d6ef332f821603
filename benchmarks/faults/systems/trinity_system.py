"""Trinity, on the machine that the command runs on."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from systems.base import ROOT, Settings

_TRINITY = [sys.executable, "-m", "trinity.cli.main"]
_ATTACKS = (
    "changes without an identity",
    "changes by an explorer",
    "a group of a stranger to NATS",
    "a group below another explorer's subject",
)


class Trinity:
    name = "trinity"
    ahead, parts = 1, frozenset({"engine", "explorers", "services", "turns", "versions"})
    recovery = (
        "`trinity run` restarts services; resumes from its newest checkpoint and the ledger; reproducible: true, "
        "but for episodes of several turns, whose turns are journaled without it"
    )

    def prepare(self, settings: Settings, folder: Path) -> None:
        values: dict[str, Any] = {
            "project": "faults",
            "name": "run",
            "checkpoint_root_dir": str(folder / "disk"),
            "reproducible": settings.turns == 1,  # turns are journaled without it
            "model": {
                "model_path": str(settings.model),
                "max_prompt_tokens": 32 * settings.turns,
                "max_response_tokens": settings.tokens,
                "max_model_len": (32 + settings.tokens) * settings.turns,
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
        if settings.gpu:
            values["explorer"] = {"rollout_model": {"gpu_memory_utilization": 0.3, "enforce_eager": True}}
        if settings.turns > 1:
            played = {"environment": "tool", "environment_args": {"turns": settings.turns}}
            values["buffer"]["explorer_input"]["taskset"] |= {
                "default_workflow_type": "environment_workflow",
                "default_reward_fn_type": None,
                "workflow_args": played,
            }
        (folder / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))

    def command(self, settings: Settings | None, folder: Path) -> Sequence[str]:
        plugins = ROOT / "benchmarks/faults/plugins"
        return [*_TRINITY, "run", "--config", str(folder / "run.yaml"), "--plugin-dir", str(plugins)]

    def beside(self, what: str, folder: Path) -> Sequence[str]:
        if what == "join":
            return [*self.command(None, folder), "mode=explore", "explorer.name=second"]
        if what == "attack":
            script = [sys.executable, str(ROOT / "tests/security/attacks.py")]
            return [*script, "--job", str(folder / "disk/faults/run"), "--only", *_ATTACKS]
        return [*_TRINITY, "weights", "rollback", "latest-2", "--yes", "--config", str(folder / "run.yaml")]

    def sampler(self, root: psutil.Process) -> psutil.Process | None:
        found = (one for one in root.children(recursive=True) if "VLLM::EngineCore" in "".join(one.cmdline()))
        return next(found, None)

    def paths(self) -> Sequence[str]:
        return [str(ROOT / "benchmarks/faults/systems/trinity_engine")]
