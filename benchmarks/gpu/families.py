"""Do the engines of a GPU load versions of each family of docs/models.md? A line for each, also saved as JSON.

    python benchmarks/gpu/families.py [--only qwen3_5 gemma3] [--at-once 4] [--seconds 200] [--out families.json]

Tiny random models in bfloat16, one engine each on a part of the GPU, in processes of their own with a time limit. `yes`
if the engine's log-probabilities come back to the trainer's once it has loaded the version.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

SIZES = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "attention_chunk_size": 128, "mamba_d_head": 64,
}  # fmt: skip
_MARK = "measured: "


def measure(kind: str, share: float) -> None:
    """Prints one family's differences, in this process."""
    from models.engines import differences_of
    from models.families import FAMILIES

    family = next(one for one in FAMILIES if one.kind == kind)
    sizes = SIZES | ({"head_dim": 64} if "kv_lora_rank" in family.text else {})
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(
            differences_of(
                family,
                Path(folder),
                sizes,
                "cuda",
                gpu_memory_utilization=share,
                kv_cache_memory_bytes=2**30,
                max_num_batched_tokens=4096,
            )
        )
    print(_MARK + json.dumps(asdict(found)), flush=True)


def in_a_process(kind: str, share: float, seconds: float) -> dict[str, Any]:
    """Returns the differences, or the last error of the process."""
    command = [sys.executable, __file__, "--one", kind, "--share", str(share)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"kind": kind, "error": f"no result within {seconds:g} s"}
    lines = (done.stdout + done.stderr).splitlines()
    marked = [line for line in lines if line.startswith(_MARK)]
    if marked:
        return {"kind": kind, **json.loads(marked[-1].removeprefix(_MARK))}
    errors = [line.strip() for line in lines if "Error" in line]
    return {"kind": kind, "error": (errors or lines or ["no output"])[-1][:300]}


def line_of(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['kind']:18} no: {found['error']}"
    loaded = "yes" if found["after"] < max(0.15, 2 * found["before"]) and found["stale"] > 3 * found["after"] else "NO"
    return f"{found['kind']:18} {loaded:4} {found['before']:.4f} {found['stale']:.4f} {found['after']:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="model_type of some families")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=200, help="of each engine")
    parser.add_argument("--out", type=Path, default=Path("families.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one, args.share)
        return
    from models.families import FAMILIES

    kinds = args.only or [family.kind for family in FAMILIES]
    share = 0.8 / args.at_once
    results = []
    print("mean difference of log-probabilities: with the files, before the load, after it", flush=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        for done in as_completed(pool.submit(in_a_process, kind, share, args.seconds) for kind in kinds):
            results.append(done.result())
            print(line_of(results[-1]), flush=True)
            args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
