"""Unmerged adapters against merged ones: seconds of a swap, tokens a second, distance from the trainer.

    python benchmarks/adapters.py [--tiny] [--hidden 896 --layers 24 ...] [--rank 32] [--held 1 4 8] [--runs 3]
    python benchmarks/adapters.py --device cuda --size 1.5B [--requests 256]    both engines on one GPU

Two engines with a random Qwen2: one merges adapters on all linear layers at each load, one holds them. They
work in turns, round by round. A swap is loaded while requests run; merged it pauses them. `--requests` sequences are
then sampled together, spread over the adapters that are held. The distance is that of log-probabilities in --dtype to
those of peft in float32, of the same tokens.
"""

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parent / "gpu"))

import structlog
from buffer_table import Table
from rollout import make_model
from whole_run import SHAPES

FULL = {
    "hidden": 896, "layers": 24, "intermediate": 4864, "heads": 14, "kv_heads": 2, "vocabulary": 16_000, "runs": 3,
    "rank": 32, "requests": 8, "prompt": 64, "response": 64,
}  # fmt: skip
TINY = {
    "hidden": 128, "layers": 2, "intermediate": 256, "heads": 4, "kv_heads": 2, "vocabulary": 512, "runs": 1,
    "rank": 8, "requests": 4, "prompt": 16, "response": 16,
}  # fmt: skip
_SETTLE_SECONDS = 1.0
_SHARE = 0.35  # of a GPU's memory, for each of the two engines


def make_adapters(
    model: Path, folder: Path, rank: int, seed: int, probes: list[list[int]], device: str, dtype: str
) -> tuple[Any, Any]:
    """Adapters on all linear layers in a folder of peft, in the dtype of the engine, as a trainer publishes them.

    Returns their Lora, and peft's log-probabilities of probes, computed in float32.
    """
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from trinity.weights.lora import Lora, LoraTarget

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    policy = get_peft_model(base, LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
    published = getattr(torch, dtype)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.01)
        if "lora_" in name:
            parameter.data = parameter.data.to(published).float()
    policy.save_pretrained(folder)
    rounded = {name: tensor.to(published) for name, tensor in get_peft_model_state_dict(policy).items()}
    save_file(rounded, folder / "adapter_model.safetensors")
    adapted = [(name, module) for name, module in base.named_modules() if hasattr(module, "lora_A")]
    targets = tuple(LoraTarget(f"{name}.weight", tuple(module.base_layer.weight.shape)) for name, module in adapted)
    logprobs = []
    with torch.no_grad():
        for tokens in probes:
            ids = torch.tensor(tokens, device=device)[None]
            logs = torch.log_softmax(policy(ids).logits[0, :-1], -1)
            logprobs.append(logs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy())
    return Lora(rank, float(rank), targets), logprobs


class Pair:
    """The two engines, with the same adapters for each."""

    def __init__(self, merged: Any, unmerged: Any, model: Path, adapters: list[tuple[Path, Any]]) -> None:
        from trinity.weights.manifest import manifest_of_folder

        self.merged, self.unmerged = merged, unmerged
        files, tensors = manifest_of_folder("bench", 0, model, checksums=False).load_arguments(model)
        base = {"base_files": files, "base_tensors": [list(tensor) for tensor in tensors]}
        self.for_merged: list[dict[str, Any]] = []
        self.for_unmerged: list[dict[str, Any]] = []
        for folder, lora in adapters:
            made = manifest_of_folder("bench", 1, _as_version(folder), checksums=False)
            files, tensors = made.load_arguments(folder / "version")
            self.for_unmerged.append({"lora": lora, "files": files})
            named = [list(tensor) for tensor in tensors]
            self.for_merged.append({"files": files, "tensors": named, **base, "lora": lora.plain()})
        self._serial = 0

    async def load(self, engine: Any, index: int) -> float:
        self._serial += 1
        of_engine = self.for_merged if engine is self.merged else self.for_unmerged
        return float(await engine.load(self._serial, of_engine[index]))

    def close(self) -> None:
        self.merged.close()
        self.unmerged.close()


def _as_version(folder: Path) -> Path:
    """The adapters' file under the name that a whole model's has."""
    version = folder / "version"
    version.mkdir(exist_ok=True)
    if not (version / "model.safetensors").exists():
        (version / "model.safetensors").symlink_to(folder / "adapter_model.safetensors")
    return version


async def swap(pair: Pair, engine: Any, index: int, args: argparse.Namespace) -> float:
    """Seconds for which a load keeps requests from sampling."""
    running = [asyncio.create_task(request(engine, "", args, 10_000 + n)) for n in range(args.requests)]
    await asyncio.sleep(_SETTLE_SECONDS)
    seconds = await pair.load(engine, index)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return seconds


async def request(engine: Any, adapter: str, args: argparse.Namespace, salt: int) -> None:
    from trinity.data.experience import SamplingParams

    prompt = [(salt * 31 + position * 7) % 250 for position in range(args.prompt)]
    sampling = SamplingParams(max_tokens=args.response, ignore_eos=True)
    await engine.generate(prompt, sampling, adapter=adapter)


async def speed(engine: Any, names: list[str], args: argparse.Namespace, salt: int) -> float:
    """Tokens a second of requests spread over adapters."""
    begin = time.perf_counter()
    await asyncio.gather(
        *(request(engine, names[n % len(names)], args, salt * args.requests + n) for n in range(args.requests))
    )
    return args.requests * args.response / (time.perf_counter() - begin)


async def measure(args: argparse.Namespace, folder: Path) -> list[Table]:
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions

    model, held = folder / "model", sorted(args.held)
    make_model(model, args)
    probes = [[(11 * i + 3 * k) % 250 for i in range(args.prompt)] for k in range(4)]
    count = max(held)
    made = []
    expected: list[Any] = []
    for index in range(2):
        lora, expected = make_adapters(
            model, folder / f"adapter{index}", args.rank, index, probes, args.device, args.dtype
        )
        made.append((folder / f"adapter{index}", lora))
    length = args.prompt + args.response + 1
    common: dict[str, Any] = {"dtype": args.dtype, "max_num_seqs": args.requests, "gpu_memory_utilization": _SHARE}
    merged = await Engine.start(EngineOptions(str(model), args.device, length, **common))
    unmerged = await Engine.start(
        EngineOptions(str(model), args.device, length, **common, adapters=count + 3, adapter_rank=args.rank)
    )
    pair = Pair(merged, unmerged, model, made)
    swaps: dict[str, list[float]] = {"merged": [], "unmerged": []}
    speeds: dict[str, list[float]] = {"merged": [], **{f"{number} held": [] for number in held}}
    try:
        for engine in (merged, unmerged):
            await speed(engine, [""], args, 0)  # the first batch compiles
            await pair.load(engine, 0)
        for run in range(args.runs):
            swaps["merged"].append(await swap(pair, merged, run % 2, args))
            swaps["unmerged"].append(await swap(pair, unmerged, run % 2, args))
        for run in range(args.runs):
            speeds["merged"].append(await speed(merged, [""], args, 2 * run + 1))
            for number in held if run % 2 == 0 else reversed(held):
                names = [f"a{index}" for index in range(number)]
                for name in names:
                    if name not in unmerged.adapters.names:
                        await unmerged.adapters.load(name, made[0][0])
                for name in [one for one in unmerged.adapters.names if one and one not in names]:
                    await unmerged.adapters.drop(name)
                speeds[f"{number} held"].append(await speed(unmerged, names, args, 2 * run + 2))
        gaps = {}
        for name, engine in (("merged", merged), ("unmerged", unmerged)):
            await pair.load(engine, 1)
            found = [abs(await engine.logprobs(probe) - due) for probe, due in zip(probes, expected, strict=True)]
            gaps[name] = statistics.fmean(float(each.mean()) for each in found), max(float(e.max()) for e in found)
    finally:
        pair.close()
    return tables(args, folder, swaps, speeds, gaps)


def tables(args: argparse.Namespace, folder: Path, swaps: Any, speeds: Any, gaps: Any) -> list[Table]:
    model, adapter = (
        sum(path.stat().st_size for path in (folder / name).glob("*.safetensors")) for name in ("model", "adapter0")
    )
    width = 4e6 if args.device == "cpu" else 2e6  # bytes of a million parameters in the model's file
    about = (
        f"{model / width:,.0f} M parameters, rank {args.rank} on all linear layers: {adapter / 1e6:,.1f} MB a version"
    )
    first = Table("a swap while requests run", ("", "median ms", "least", "most"), [about])
    for name, seconds in swaps.items():
        shown = (statistics.median(seconds), min(seconds), max(seconds))
        first.rows.append((name, *(f"{1000 * value:,.0f}" for value in shown)))
    second = Table(
        f"tokens/s of {args.requests} sequences, {args.prompt} in, {args.response} out, {args.dtype}",
        ("", "median", "of merged", "rounds"), [f"{args.runs} alternating rounds"],
    )  # fmt: skip
    for name, rates in speeds.items():
        ratios = [rate / merged for rate, merged in zip(rates, speeds["merged"], strict=True)]
        rounds = ", ".join(f"{rate:.0f}" for rate in rates)
        second.rows.append((name, f"{statistics.median(rates):.0f}", f"{statistics.median(ratios):.2f}", rounds))
    third = Table(f"distance in nats from peft in float32, {args.dtype}", ("", "mean", "largest"), [])
    for name, (mean, largest) in gaps.items():
        third.rows.append((name, f"{mean:.2e}", f"{largest:.2e}"))
    return [first, second, third]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in FULL.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--held", type=int, nargs="+", default=[1, 4, 8], help="numbers of adapters")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the engines; default float32 on the CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=list(SHAPES), help="shape of the model, in place of --hidden and so on")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    vars(args).update(SHAPES[args.size] if args.size else TINY if args.tiny else {})
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as name:
        for table in asyncio.run(measure(args, Path(name))):
            table.show()


if __name__ == "__main__":
    from trinity.runtime.torch_builds import hide_unusable_companions

    hide_unusable_companions()
    main()
