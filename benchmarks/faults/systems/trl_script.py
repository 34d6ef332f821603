"""A script for TRL, as its documentation writes it, with the probe and the numbered grader. torchrun starts it."""

import argparse
from pathlib import Path
from typing import Any

import probe
import probe_engine
from grader import grade

from trinity.runtime.torch_builds import hide_unusable_companions

hide_unusable_companions()  # a torchvision that does not fit torch's CPU build keeps transformers from importing
probe.install()
probe_engine.install()


def rewards(completions: list[Any], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
    texts = (completion[0]["content"] for completion in completions)
    return [grade(*given) for given in zip(row, texts, completion_ids, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "tasks", "group", "tokens", "save-every", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()

    from datasets import load_dataset
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(args.out), per_device_train_batch_size=args.tasks * args.group, num_generations=args.group,
        max_completion_length=args.tokens, num_train_epochs=1, max_steps=args.steps, learning_rate=1e-4,
        lr_scheduler_type="constant", temperature=1.0, beta=0.0, max_grad_norm=1.0, seed=args.seed,
        save_strategy="steps", save_steps=args.save_every, save_total_limit=2, gradient_checkpointing=False,
        use_vllm=args.gpu, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, use_cpu=not args.gpu, bf16=args.gpu,
        model_init_kwargs={"dtype": "float32"}, report_to="none", logging_steps=1,
    )  # fmt: skip
    data = load_dataset("json", data_files=str(args.data / "train.jsonl"), split="train")
    data = data.map(lambda line: {"prompt": [{"role": "user", "content": line["question"]}]})
    trainer = GRPOTrainer(str(args.model), rewards, config, train_dataset=data)
    newest = get_last_checkpoint(str(args.out)) if args.out.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()
