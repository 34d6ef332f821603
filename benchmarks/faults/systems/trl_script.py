"""A script for TRL, as its documentation writes it, with the probe and the numbered grader. torchrun starts it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import probe
import probe_engine
from grader import grade
from tool import Tool

from trinity.runtime.torch_builds import hide_unusable_companions

hide_unusable_companions()  # a torchvision that does not fit torch's CPU build keeps transformers from importing
probe.install()
probe_engine.install()


def rewards(completions: list[Any], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
    texts = (completion[0]["content"] for completion in completions)
    return [grade(*given) for given in zip(row, texts, completion_ids, strict=True)]


def rewards_of_tool(reward: list[float], **_: Any) -> list[float]:
    return reward


def playing(turns: int, row_of: dict[str, int]) -> Callable[..., dict[str, list[Any]]]:
    """Returns a `rollout_func`, which plays the episodes of a batch turn by turn."""

    def play(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        tokenizer = trainer.processing_class

        def ids_of(message: dict[str, str]) -> list[int]:
            return list(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False))

        asked = [ids_of(prompt[-1]) for prompt in prompts]
        tools = [Tool(row_of[prompt[-1]["content"]], turns) for prompt in prompts]
        made, masks, rewards = [[] for _ in prompts], [[] for _ in prompts], [0.0] * len(prompts)
        for _ in range(turns):
            context = [{"input_ids": before + after} for before, after in zip(asked, made, strict=True)]
            given = tokenizer.pad(context, padding_side="left", return_tensors="pt").to(trainer.model.device)
            found = trainer.model.generate(**given, generation_config=trainer.generation_config)
            for number, ids in enumerate(found[:, given["input_ids"].shape[1] :].tolist()):
                end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
                answer, reward = tools[number].step(tokenizer.decode(ids[:end], skip_special_tokens=True))
                between = ids_of({"role": "user", "content": answer}) if reward is None else []
                made[number] += [*ids[:end], tokenizer.eos_token_id, *between]
                masks[number] += [1] * len(ids[: end + 1]) + [0] * (len(between) + (end == len(ids)))
                rewards[number] = reward or 0.0
        return {"prompt_ids": asked, "completion_ids": made, "logprobs": None, "env_mask": masks, "reward": rewards}

    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "tasks", "group", "tokens", "save-every", "seed", "turns"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--server", metavar="URL", help="of a vLLM server that samples; else this process does")
    args = parser.parse_args()

    from datasets import load_dataset
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(args.out), per_device_train_batch_size=args.tasks * args.group, num_generations=args.group,
        max_completion_length=args.tokens, num_train_epochs=1, max_steps=args.steps, learning_rate=1e-4,
        lr_scheduler_type="constant", temperature=1.0, beta=0.0, max_grad_norm=1.0, seed=args.seed,
        save_strategy="steps", save_steps=args.save_every, save_total_limit=2, gradient_checkpointing=False,
        use_vllm=args.gpu, vllm_mode="server" if args.server else "colocate", vllm_server_base_url=args.server,
        vllm_gpu_memory_utilization=0.3, use_cpu=not args.gpu, bf16=args.gpu,
        model_init_kwargs={"dtype": "float32"}, report_to="none", logging_steps=1,
    )  # fmt: skip
    data = load_dataset("json", data_files=str(args.data / "train.jsonl"), split="train")
    data = data.map(lambda line: {"prompt": [{"role": "user", "content": line["question"]}]})
    if args.turns == 1:
        trainer = GRPOTrainer(str(args.model), rewards, config, train_dataset=data)
    else:
        play = playing(args.turns, dict(zip(data["question"], data["row"], strict=True)))
        trainer = GRPOTrainer(str(args.model), rewards_of_tool, config, train_dataset=data, rollout_func=play)
    newest = get_last_checkpoint(str(args.out)) if args.out.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()
