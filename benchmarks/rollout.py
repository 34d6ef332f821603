"""Rollout through the explorer against plain vLLM, on the same prompts with the same sampling.

    python benchmarks/rollout.py [--tiny] [--device cuda] [--hidden 1536 --layers 28 ...]

Two engines in separate processes, with two sides each, warmed up: plain `LLM.generate` with and without the sampled
tokens' log-probabilities; the explorer's engine (called by its Generate RPC) and a whole attempt (workflow, scoring by
a real environment service, the group encoded for the log), both with log-probabilities.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
LIMIT = 0.90


def make_model(folder: Path, args: argparse.Namespace) -> None:
    """A Qwen2 with random weights and the quickstart's byte tokenizer."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples/quickstart"))
    import torch
    from make_model import make_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=max(len(tokenizer), args.vocabulary), hidden_size=args.hidden, num_hidden_layers=args.layers,
        intermediate_size=args.intermediate or args.hidden * 4, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads or args.heads, max_position_embeddings=4096, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
    )  # fmt: skip
    with torch.device(args.device):
        model = Qwen2ForCausalLM(config).to(config.dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def questions(args: argparse.Namespace, salt: str) -> list[str]:
    """Prompts of about --prompt bytes; `salt` keeps a warm-up from filling the prefix cache."""
    return [(f"{salt}{index} what is the sum? " * args.prompt)[: args.prompt] for index in range(args.tasks)]


def plain(model: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of LLM.generate, with log-probabilities and without."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "model": model,
        "max_model_len": args.prompt + args.response + 64,
        "disable_log_stats": True,
    }
    options |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    if args.device == "cuda":
        options |= {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN"}
    else:
        options |= {"dtype": "float32", "enforce_eager": True}
    llm = LLM(**options)
    tokenizer = AutoTokenizer.from_pretrained(model)
    seconds = {}
    for side in ("plain", "bare"):
        sampling = SamplingParams(
            n=args.group, temperature=1.0, max_tokens=args.response, ignore_eos=True, detokenize=False,
            logprobs=0 if side == "plain" else None, flat_logprobs=True,
        )  # fmt: skip
        for salt in (f"{side} warm", f"{side} hot"):
            chats = [[{"role": "user", "content": text}] for text in questions(args, salt)]
            prompts = [
                {"prompt_token_ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)}
                for chat in chats
            ]
            begin = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds[side] = time.perf_counter() - begin
            assert sum(len(part.token_ids) for out in outputs for part in out.outputs) == args.tokens
    return seconds


async def ours(model: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the explorer: its engine, and a whole attempt with workflow, scoring and encoding."""
    from support.fakes.data.experience import make_task
    from support.servers.service import ServiceProcess
    from trinity.config.schema.buffer import FormatConfig
    from trinity.config.schema.model import ModelConfig
    from trinity.data.experience import Group, SamplingParams
    from trinity.data.wire import encode_outcome
    from trinity.explorer.chat import ChatTokenizer
    from trinity.explorer.engine.auxiliary import AuxiliaryModels
    from trinity.explorer.engine.pool import EnginePool
    from trinity.explorer.environments.client import EnvironmentClient
    from trinity.explorer.rollout import attempt
    from trinity.explorer.rollout.toolbox import ExplorerTools
    from trinity.explorer.types import EngineOptions

    environment = ServiceProcess("environment", Path(model)).start()
    tokenizer = ChatTokenizer(ModelConfig(model_path=model))
    length = args.prompt + args.response + 64
    pool = await EnginePool.start(EngineOptions(model=model, device=args.device, max_model_len=length), [None])
    tools = ExplorerTools(pool, tokenizer, EnvironmentClient(environment.address), AuxiliaryModels({}), length, length)
    sampling = SamplingParams(max_tokens=args.response, n=args.group, ignore_eos=True)
    form = FormatConfig(prompt_key="question", response_key="answer").model_dump_json()

    async def sample(_: int, text: str) -> int:
        completions = await pool.generate(tokenizer.prompt([{"role": "user", "content": text}]), sampling)
        return sum(len(completion.token_ids) for completion in completions)

    async def explore(index: int, text: str) -> int:
        row = json.dumps({"question": text, "answer": "#### 42"})
        task = make_task(
            index + 1, row_json=row, format_json=form, repeat_times=args.group, sampling=sampling, timeout_seconds=600.0
        )
        group = await attempt.explore(task, 1, "bench", tools)
        assert isinstance(group, Group), group
        assert encode_outcome(group)
        return group.response_tokens

    seconds = {}
    try:
        for side, one in {"engine": sample, "attempt": explore}.items():
            for salt in (f"{side} warm", f"{side} hot"):
                begin = time.perf_counter()
                made = await asyncio.gather(*(one(index, text) for index, text in enumerate(questions(args, salt))))
                seconds[side] = time.perf_counter() - begin
                assert sum(made) == args.tokens
    finally:
        pool.close()
        environment.kill()
    return seconds


SIDES = {
    "plain": "plain vLLM LLM.generate",
    "bare": "plain, without log-probabilities",
    "engine": "explorer: engine",
    "attempt": "explorer: workflow, scoring, encoding",
}
ENGINES = ("plain", "explorer")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for name, value in {"tasks": 32, "group": 8, "prompt": 64, "response": 128, "hidden": 192, "layers": 6, "heads": 6,
                        "kv-heads": 0, "intermediate": 0, "vocabulary": 4096}.items():  # fmt: skip
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    made.add_argument("--engine", choices=list(ENGINES), help=argparse.SUPPRESS)
    made.add_argument("--model", help=argparse.SUPPRESS)
    return made


def rates_of(args: argparse.Namespace, arguments: list[str]) -> dict[str, float]:
    """Tokens per second of every side; `arguments` are those of the command line."""
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args)
        for engine in ENGINES:
            command = [sys.executable, __file__, *arguments, "--engine", engine, "--model", folder]
            # The explorer's settings on a CPU, for every side.
            given = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"} if args.device == "cpu" else {}
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **given})
            lines = [line for line in done.stdout.splitlines() if line.startswith("SECONDS ")]
            assert lines, done.stdout[-3000:] + done.stderr[-3000:]
            for side, seconds in json.loads(lines[-1].removeprefix("SECONDS ")).items():
                rates[side] = args.tokens / seconds
                print(f"  {SIDES[side]}: {rates[side]:,.0f} tokens/s", file=sys.stderr, flush=True)
    return rates


def main(arguments: list[str] | None = None) -> None:
    made = parser()
    given = sys.argv[1:] if arguments is None else arguments
    args = made.parse_args(given)
    if args.tiny:
        args.tasks, args.group, args.response = 4, 2, 16
    args.tokens = args.tasks * args.group * args.response
    if args.engine:
        seconds = plain(args.model, args) if args.engine == "plain" else asyncio.run(ours(args.model, args))
        print(f"\nSECONDS {json.dumps(seconds)}", flush=True)
        return
    rates = rates_of(args, given)
    print(f"{args.tasks} tasks x {args.group} rollouts x {args.response} tokens on {args.device}")
    print(f"{'path':<42}{'tokens/s':>12}{'of plain':>10}{'of plain without':>18}{'limit':>8}")
    for side, rate in rates.items():
        limit = f"{LIMIT:.2f}" if side in ("engine", "attempt") else ""
        print(f"{SIDES[side]:<42}{rate:>12,.0f}{rate / rates['plain']:>10.2f}{rate / rates['bare']:>18.2f}{limit:>8}")


if __name__ == "__main__":
    main()
