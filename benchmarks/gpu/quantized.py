"""An explorer's engine in bfloat16, with weights in FP8, and with its cache in FP8 too. A 7 B shape on one GPU.

    python benchmarks/gpu/quantized.py           512 sequences of 256 + 512 tokens; about six minutes
    python benchmarks/gpu/quantized.py --cpu --tiny     weights in int8, because FP8 needs a GPU

The engines run in turn, in processes of their own. Each loads a version of other weights through the path of a run,
and then samples. transformers computes log-probabilities of some samples in float32 with that version's weights. The
random head is scaled, so that logits have a standard deviation of 3, as those of a language model. The last columns are
distances from float32: the mean error of a token's log-probability, and KL by the estimator r - 1 - log r. The bound is
the canary's for half precision with this head.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from logprobs import TINY, TINY_WORK, WORK, timed
from own_process import FOUND, found_by
from whole_run import SHAPES

LEAST_GAIN = 1.4
LOGIT_DEVIATION = 3.0
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("bfloat16", {}),
    "fp8": ("FP8 weights", {"quantization": "fp8"}),
    "fp8-cache": ("FP8 weights and cache", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
}
ON_CPU: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("bfloat16", {}),
    "fp8": ("int8 weights", {"quantization": "int8_per_channel_weight_only"}),
}
PROCESS_SECONDS = 280


def make_models(folder: Path, args: argparse.Namespace) -> None:
    """The model of version 0 and, in `next`, the weights of a later version."""
    import torch
    from rollout import make_model
    from safetensors.torch import load_file, save_file

    make_model(folder / "model", args)
    (folder / "next").mkdir()
    for path in sorted((folder / "model").glob("*.safetensors")):
        tensors = load_file(path, device=args.device)
        for name, tensor in tensors.items():
            if name == "lm_head.weight":  # a normalised hidden state has a length of sqrt(hidden)
                tensor.mul_(LOGIT_DEVIATION / (tensor.float().std() * args.hidden**0.5))
            elif tensor.dim() > 1:
                tensor.add_(torch.randn_like(tensor), alpha=0.1 * float(tensor.float().std()))
        save_file(tensors, folder / "next" / path.name, {"format": "pt"})
    for path in (folder / "model").iterdir():
        if path.suffix != ".safetensors":
            (folder / "next" / path.name).write_bytes(path.read_bytes())


async def sample(args: argparse.Namespace, folder: Path, side: str) -> dict[str, float]:
    """Seconds of the second load and tokens a second; writes the samples of the loaded weights."""
    from safetensors import safe_open

    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions

    arguments = (ON_CPU if args.cpu else SIDES)[side][1]
    options = EngineOptions(
        str(folder / "model"), args.device, args.prompt + args.response + 1, dtype="bfloat16", engine_args=arguments
    )
    engine = await Engine.start(options)
    try:
        files = sorted((folder / "next").glob("*.safetensors"))
        named = [[name, index] for index, path in enumerate(files) for name in safe_open(path, "pt").keys()]  # noqa: SIM118
        for serial in (1, 2):
            begin = time.perf_counter()
            await engine.load(serial, {"files": [str(path) for path in files], "tensors": named})
            loading = time.perf_counter() - begin
        seconds, sampled = await timed(engine, args)
    finally:
        engine.close()
    (folder / f"{side}.json").write_text(json.dumps(sampled))
    return {"load": loading, "rate": args.tasks * args.group * args.response / seconds}


def distances(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Mean and largest error and KL of each side's samples; the canary's bound for this model, of half precision."""
    import torch
    from transformers import AutoModelForCausalLM

    from trinity.trainer.weights.canary import _HALF, widened

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder / "next", dtype=torch.float32).to(args.device).eval()
    found: dict[str, dict[str, float]] = {}
    exact_rows, rounded_rows = [], []
    for side in ON_CPU if args.cpu else SIDES:
        sampled = json.loads((folder / f"{side}.json").read_text())
        differences = []
        for prompt, tokens, logprobs in sampled[:: max(1, len(sampled) // args.checked)]:
            ids = torch.tensor([prompt + tokens], device=args.device)
            with torch.no_grad():
                hidden = model.model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
                exact = _chosen(model.lm_head(hidden), ids[0, len(prompt) :])
                if side == "plain" and len(exact_rows) < 4:
                    head = model.lm_head.weight.to(torch.bfloat16)
                    rounded = _chosen(hidden.to(torch.bfloat16) @ head.T, ids[0, len(prompt) :])
                    exact_rows.append(exact[:64].tolist())
                    rounded_rows.append(rounded[:64].tolist())
            differences.append(exact - torch.tensor(logprobs, device=args.device, dtype=torch.float64))
        ratio = torch.cat(differences)
        found[side] = {
            "mean": float(ratio.abs().mean()), "max": float(ratio.abs().max()),
            "kl": float((ratio.exp() - 1 - ratio).mean()),
        }  # fmt: skip
    mean, most = widened(_HALF, exact_rows, rounded_rows)
    return {**found, "bound": {"mean": mean, "max": most}}


def _chosen(logits: Any, ids: Any) -> Any:
    return logits.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def show(args: argparse.Namespace, found: dict[str, dict[str, float]], bound: dict[str, float]) -> None:
    from buffer_table import Table, at_least

    table = Table(
        f"{args.tasks} prompts x {args.group} of {args.prompt} + {args.response} tokens on {args.device}",
        ("engine", "loads in s", "tokens/s", "of the first", "mean error", "max error", "KL"),
        [
            f"gain >= {LEAST_GAIN}; canary's bound in half precision: mean {bound['mean']:.3g}, max {bound['max']:.3g} "
            "nats"
        ],
    )
    first = next(iter(found.values()))["rate"]
    for side, seen in found.items():
        gain = seen["rate"] / first
        table.rows.append((
            (ON_CPU if args.cpu else SIDES)[side][0], f"{seen['load']:.2f}", f"{seen['rate']:,.0f}",
            "1.00" if side == "plain" else f"{gain:.2f} ({at_least(gain, LEAST_GAIN)})",
            f"{seen['mean']:.2e}", f"{seen['max']:.2e}", f"{seen['kl']:.2e}",
        ))  # fmt: skip
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="7B", help="shape of the model")
    for name, value in WORK.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    parser.add_argument("--process", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cpu" if args.cpu else "cuda"
    vars(args).update({**TINY, **TINY_WORK} if args.tiny else SHAPES[args.size])
    if args.process:
        print(f"\n{FOUND}{json.dumps(asyncio.run(sample(args, Path(args.model).parent, args.process)))}", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="quantized-") as name:
        import torch

        folder = Path(name)
        make_models(folder, args)
        torch.cuda.empty_cache()
        given = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"} if args.cpu else {}
        sides = ON_CPU if args.cpu else SIDES
        found = {
            side: found_by(side, "--model", str(folder / "model"), limit_seconds=PROCESS_SECONDS, **given)
            for side in sides
        }
        of = distances(args, folder)
        show(args, {side: {**seen, **of[side]} for side, seen in found.items()}, of["bound"])


if __name__ == "__main__":
    main()
