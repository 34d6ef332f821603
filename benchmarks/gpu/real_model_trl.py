"""The peer of real_model.py: TRL's GRPO on the same problems, for a given time: a process per GPU, each with vLLM.

real_model.py starts it with torch.distributed.run. Writes OUT/model and OUT/steps.json. Needs trl.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from real_model_judge import messages, verdict

BEGAN = float(os.environ.get("REAL_MODEL_BEGAN", time.time()))


def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    replies = (completion[0]["content"] for completion in completions)
    return [verdict("math_boxed_reward", reply, truth) for reply, truth in zip(replies, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("tasks", "group", "steps", "tokens", "seed", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="since the command: no step begins later")
    parser.add_argument("--cpu", action="store_true", help="sampled by transformers")
    args = parser.parse_args()

    from accelerate.utils import broadcast_object_list
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def on_log(self, _: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
            if logs and "reward" in logs:
                found = {"reward": float(logs["reward"]), "tokens": float(logs["completions/mean_length"])}
                self.steps.append({"step": state.global_step, "seconds": time.time() - BEGAN, **found})
                print(f"  {self.steps[-1]}", flush=True)

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            stop = [time.time() - BEGAN > args.seconds]
            control.should_training_stop |= broadcast_object_list(stop)[0]  # all ranks at the same step

    world = int(os.environ.get("WORLD_SIZE", "1"))
    mine = args.tasks * args.group // world
    rows_at_once = min(args.rows, mine)
    engine: dict[str, Any] = {"use_vllm": False, "use_cpu": True, "bf16": False} if args.cpu else {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "bf16": True,
        "vllm_max_model_length": 1024,
    }  # fmt: skip
    config = GRPOConfig(
        output_dir=str(args.out / "trl"), per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=mine // rows_at_once, num_generations=args.group,
        max_completion_length=args.tokens, max_steps=args.steps, learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup", warmup_steps=args.warmup,
        temperature=1.0, beta=0.0, weight_decay=0.01, max_grad_norm=1.0,
        gradient_checkpointing=False, seed=args.seed, logging_steps=1, save_strategy="no", report_to="none", **engine,
    )  # fmt: skip
    problems = [json.loads(line) for line in (args.data / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": messages(row["question"]), "answer": row["answer"]} for row in problems])
    watch = Watch()
    trainer = GRPOTrainer(str(args.model), rewards, config, train_dataset=data, callbacks=[watch])
    trainer.train()
    if trainer.accelerator.is_main_process:
        (args.out / "steps.json").write_text(json.dumps(watch.steps))
        trainer.save_model(str(args.out / "model"))


if __name__ == "__main__":
    main()
