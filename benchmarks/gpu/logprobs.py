"""Cost and accuracy of log-probabilities of the sampled tokens. A 1.5 B model on one GPU.

    python benchmarks/gpu/logprobs.py            512 sequences of 256 + 512 tokens; about four minutes
    python benchmarks/gpu/logprobs.py --cpu --tiny

Two engines run in turn, warmed up: plain vLLM, with and without log-probabilities, and the explorer's. transformers
computes some of the samples again in float32 on the same weights. The error of a token is the difference of its
log-probability, in nats, mostly due to bf16 rounding in the layers. So the explorer's error is compared with plain
vLLM's. The explorer's formula for log-probabilities is also compared with float64, on the same float32 logits.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from own_process import FOUND, found_by

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

LEAST_OF_BARE, MOST_OF_PLAIN, MOST_ALONE = 0.90, 1.25, 1e-5
SIDES = {
    "bare": "plain vLLM, without log-probabilities",
    "plain": "plain vLLM, with them",
    "explorer": "explorer, with them",
    "alone": "the explorer's formula alone, on the same logits",
}
PROCESSES = ("plain", "explorer")
SHAPE = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960, "vocabulary": 151_936}
TINY = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocabulary": 512}
WORK = {"tasks": 64, "group": 8, "prompt": 256, "response": 512, "checked": 64}
TINY_WORK = {"tasks": 4, "group": 2, "prompt": 32, "response": 16, "checked": 4}
PROCESS_SECONDS = 280

Found = dict[str, dict[str, float]]
Sampled = list[tuple[list[int], list[int], list[float]]]  # prompt, sampled tokens, their log-probabilities


def prompts_of(args: argparse.Namespace, salt: str) -> list[list[int]]:
    """Token ids; `salt` keeps a warm-up from filling the prefix cache."""
    from rollout import questions
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return [tokenizer.encode(text)[: args.prompt] for text in questions(args, salt)]


def sample_plain(args: argparse.Namespace) -> dict[str, tuple[float, Sampled]]:
    """Seconds and outputs of LLM.generate of one engine, with and without log-probabilities."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
    if args.device == "cuda":
        options = {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN"}
    llm = LLM(args.model, max_model_len=args.prompt + args.response + 1, disable_log_stats=True,
              logprobs_mode="processed_logprobs", generation_config="vllm", **options)  # fmt: skip
    found: dict[str, tuple[float, Sampled]] = {}
    for side, logprobs in (("bare", None), ("plain", 0)):
        sampling = SamplingParams(
            n=args.group, temperature=1.0, max_tokens=args.response, ignore_eos=True, detokenize=False,
            logprobs=logprobs, flat_logprobs=True,
        )  # fmt: skip
        for salt in (f"warm {side}", f"hot {side}"):
            prompts = prompts_of(args, salt)
            begin = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
        made = [(ids, part) for ids, out in zip(prompts, outputs, strict=True) for part in out.outputs]
        found[side] = (
            seconds,
            [
                (ids, list(part.token_ids), [] if logprobs is None else list(part.logprobs.logprobs))
                for ids, part in made
            ],
        )
    return found


async def sample_explorer(args: argparse.Namespace) -> tuple[float, Sampled]:
    """Seconds and outputs of the explorer's engine."""
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions

    engine = await Engine.start(EngineOptions(args.model, args.device, args.prompt + args.response + 1))
    try:
        return await timed(engine, args)
    finally:
        engine.close()


async def timed(engine: Any, args: argparse.Namespace) -> tuple[float, Sampled]:
    """Seconds and outputs of an explorer's engine, after a round of other prompts that warms it up."""
    from trinity.data.experience import SamplingParams

    sampling = SamplingParams(max_tokens=args.response, n=args.group, ignore_eos=True)
    for salt in ("warm", "hot"):
        prompts = prompts_of(args, salt)
        begin = time.perf_counter()
        made = await asyncio.gather(*(engine.generate(ids, sampling) for ids in prompts))
        seconds = time.perf_counter() - begin
    return seconds, [
        (ids, completion.token_ids.tolist(), completion.logprobs.tolist())
        for ids, group in zip(prompts, made, strict=True)
        for completion in group
    ]


def errors_of(args: argparse.Namespace, model: Any, sampled: Sampled) -> dict[str, float]:
    """Mean and max difference to the model's log-probabilities, over the tokens of --checked sequences."""
    import torch

    found = []
    for prompt, tokens, logprobs in sampled[:: max(1, len(sampled) // args.checked)]:
        ids = torch.tensor([prompt + tokens], device=args.device)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        exact = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        found.append((exact - torch.tensor(logprobs, device=args.device, dtype=torch.float64)).abs())
    return mean_and_max(torch.cat(found))


def errors_alone(args: argparse.Namespace) -> dict[str, float]:
    """Error of the explorer's formula against float64, on logits like a trained model's."""
    import torch

    from trinity.explorer.engine.sampled_logprobs import sampled_logprobs

    torch.manual_seed(0)
    logits = 4 * torch.randn(512, args.vocabulary, device=args.device)
    ids = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    exact = logits.double().log_softmax(-1).gather(-1, ids[:, None])
    return mean_and_max((exact - sampled_logprobs(logits, ids)).abs())


def mean_and_max(errors: Any) -> dict[str, float]:
    return {"mean": float(errors.mean()), "max": float(errors.max())}


def rates(args: argparse.Namespace, found: dict[str, tuple[float, Sampled]]) -> Found:
    """Tokens per second of each engine. Writes the samples to a file for the reference."""
    for side, (_, sampled) in found.items():
        assert sum(len(tokens) for _, tokens, _ in sampled) == args.tokens
        sampled_file(args.model, side).write_text(json.dumps(sampled))
    return {side: {"rate": args.tokens / seconds} for side, (seconds, _) in found.items()}


def errors(args: argparse.Namespace, path: str) -> Found:
    """Errors of the engines' samples and of the formula."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(args.device).eval()
    sampled = {side: json.loads(sampled_file(path, side).read_text()) for side in ("plain", "explorer")}
    return {side: errors_of(args, model, made) for side, made in sampled.items()} | {"alone": errors_alone(args)}


def sampled_file(model: str, side: str) -> Path:
    return Path(model).with_name(f"{side}.json")


def show(args: argparse.Namespace, found: Found) -> None:
    from buffer_table import Table, at_least, at_most

    table = Table(
        f"{args.tasks} prompts x {args.group} of {args.prompt} + {args.response} tokens on {args.device}",
        ("side", "tokens/s", "mean error", "max error", "limit", "ratio"),
        [f"errors in nats, of {args.checked} sequences, against float32; of the formula alone against float64"],
    )
    bare, plain, explorer, alone = (found[side] for side in SIDES)
    of_bare, of_plain = explorer["rate"] / bare["rate"], explorer["mean"] / plain["mean"]
    rows = (
        ("bare", "", "1.00"),
        ("plain", "of bare", f"{plain['rate'] / bare['rate']:.2f}"),
        ("explorer", f"of bare >= {at_least(of_bare, LEAST_OF_BARE)}", f"{of_bare:.2f}"),
        ("explorer", f"mean error of plain's <= {at_most(of_plain, MOST_OF_PLAIN)}", f"{of_plain:.2f}"),
        ("alone", f"max error <= {at_most(alone['max'], MOST_ALONE)}", f"{alone['max'] / MOST_ALONE:.2f}"),
    )
    for side, limit, ratio in rows:
        seen = found[side]
        rate = f"{seen['rate']:,.0f}" if "rate" in seen else ""
        errors = [f"{seen[kind]:.2e}" if kind in seen else "" for kind in ("mean", "max")]
        table.rows.append((SIDES[side], rate, *errors, limit, ratio))
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {**SHAPE, **WORK}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--cpu", action="store_true", help="engines on the CPU, in float32")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cpu" if args.cpu else "cuda"
    if args.tiny:
        vars(args).update({**TINY, **TINY_WORK})
    args.tokens = args.tasks * args.group * args.response
    if args.process:
        explores = args.process == "explorer"
        made = {"explorer": asyncio.run(sample_explorer(args))} if explores else sample_plain(args)
        print(f"\n{FOUND}{json.dumps(rates(args, made))}", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="logprobs-") as folder:
        import torch
        from rollout import make_model

        make_model(Path(folder) / "model", args)
        torch.cuda.empty_cache()
        model, found = f"{folder}/model", {}
        given = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"} if args.cpu else {}
        for process in PROCESSES:
            found |= found_by(process, "--model", model, limit_seconds=PROCESS_SECONDS, **given)
        for side, seen in errors(args, model).items():
            found[side] = found.get(side, {}) | seen
    show(args, found)


if __name__ == "__main__":
    main()
