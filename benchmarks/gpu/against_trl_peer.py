"""The peer of against_trl.py: TRL's GRPO with vLLM in each process. Writes the end time of each step. Needs trl."""

import argparse
import json
import time
from pathlib import Path
from typing import Any


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("tasks", "group", "tokens", "steps", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--cpu", action="store_true", help="sampled by transformers")
    parser.add_argument("--liger", action="store_true", help="Liger's fused loss and layers; needs liger-kernel")
    parser.add_argument("--lora", type=int, help="rank of adapters that train in the model's place; needs peft")
    args = parser.parse_args()

    import os

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

    mine = args.tasks * args.group // int(os.environ.get("WORLD_SIZE", "1"))
    rows = min(args.rows, mine)
    engine: dict[str, Any] = {"use_vllm": False, "use_cpu": True, "bf16": False} if args.cpu else {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "bf16": True,
        "vllm_max_model_length": args.tokens + 64,
        "generation_kwargs": {"min_tokens": args.tokens, "ignore_eos": True}, "use_liger_kernel": args.liger,
    }  # fmt: skip
    config = GRPOConfig(
        output_dir=str(args.out.with_suffix("")), per_device_train_batch_size=rows,
        gradient_accumulation_steps=mine // rows, num_generations=args.group, max_completion_length=args.tokens,
        max_steps=args.steps, learning_rate=1e-6, temperature=1.0, beta=0.0, max_grad_norm=1.0,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", **engine,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": f"{index} + {index + 1} ="} for index in range(args.tasks * args.steps)])
    adapters = None
    if args.lora:
        from peft import LoraConfig

        config.model_init_kwargs = {"dtype": "bfloat16"}  # of what does not train
        adapters = LoraConfig(r=args.lora, lora_alpha=args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        str(args.model), reward, config, train_dataset=data, callbacks=[Watch()], peft_config=adapters
    )  # fmt: skip
    trainer.train()
    if trainer.accelerator.is_main_process:
        args.out.write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
