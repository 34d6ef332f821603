"""The trainer's engine on GPUs: tokens per second, share of the hardware's peak, memory, and cost of padding.

    python benchmarks/gpu/trainer.py [part ...]                          1.5 B on one GPU, ZeRO 2; all: seven minutes
    python benchmarks/gpu/trainer.py --size 7B --gpus 2 [4096] [16384]   ZeRO 3
    python benchmarks/gpu/trainer.py --size Qwen3-0.6B                   against prime-rl's published figures
    python benchmarks/gpu/trainer.py --size Qwen3-4B                     the same, adapters of rank 16
    python benchmarks/gpu/trainer.py --size 7B --lora 32 [--load-in-4bit] [full]       adapters, on one GPU
    python benchmarks/gpu/trainer.py --size 7B-A1B --gpus 4              64 experts, 8 of them for each token
    python benchmarks/gpu/trainer.py --cpu --tiny

A step is 16,384 tokens a GPU in one packed micro-batch, lengths mixed, and one update of AdamW, float32 masters; its
loss is GRPO's, without a reference. 4096, 16384: the longest length; gradient_checkpointing is `mlp`, on one GPU in as
few layers as 40 GiB allow. full, none: as 4096, with gradient_checkpointing true and false. unfused: as full,
without our kernels. padding: lengths uniform in [1, 4096], packed, against rows of 4 padded to the longest.
prompts: 4 groups of 8 sequences with one prompt, 4096 + 512 and 1024 + 1024 tokens each, with and without
shared_prompts, in micro-batches of at most 36,864. trees: 8 rollouts, a prompt of 4096 tokens and turns of 512, without
and with shared_prompts: two turns after each, three times, and step-wise episodes of four turns. compiled, the peer of
4096: the transformers model with torch.compile, 4 rows of 4096, the same head and loss, AdamW only on bf16, without
recompute.

sequence-16k, sequence-64k (Qwen3 sizes): one sequence a step, every layer recomputed, as prime-rl's baselines on one
H100 (its repository, benchmarks/baselines, 2026-01). mlp-16k, mlp-64k: the same, only MLPs recomputed.

6N: 6 x parameters x tokens/s, as a part of 989 TFLOP/s a GPU. Only the experts of a token count. MFU (Qwen3
sizes): as prime-rl counts it, 6 x (parameters + layers x heads x head width x length) x tokens/s. GiB: the most that
tensors took on GPU 0.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

Found = dict[str, dict[str, Any]]

SHAPES = {  # hidden, layers, heads, key-value heads, intermediate, vocabulary, tied
    "tiny": (64, 2, 4, 2, 128, 512, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "7B": (3584, 28, 28, 4, 18944, 152_064, False),
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072, 151_936, True),
    "Qwen3-4B": (2560, 36, 32, 8, 9728, 151_936, True),
    "7B-A1B": (2048, 16, 16, 16, 1024, 50_304, False),  # OLMoE's, as a Qwen3-MoE
    "tiny-A": (64, 2, 4, 2, 128, 512, True),
}
QWEN3_HEAD_WIDTH = 128
EXPERTS = {"7B-A1B": (64, 8), "tiny-A": (4, 2)}  # all, and those of a token
SEQUENCES = {"sequence-16k": 16_384, "sequence-64k": 65_536, "mlp-16k": 16_384, "mlp-64k": 65_536}
# prime-rl's tokens/s on one H100, the rank of its adapters, and the goals of this benchmark.
PRIME_RL = {
    "Qwen3-0.6B": {"tokens/s": {16_384: 11_896, 65_536: 10_147}, "rank": 0, "goal": 3.0},
    "Qwen3-4B": {"tokens/s": {16_384: 6_229, 65_536: 4_164}, "rank": 16, "goal": 2.0},
}
PARTS = ("4096", "full", "none", "unfused", "16384", "padding", "prompts", "trees", "compiled", *SEQUENCES)
GROUPS = {"long": (4096, 512, 2.5), "even": (1024, 1024, 1.3)}  # prompt, response, the least gain of sharing
PROMPTS = [f"{name}{kind}" for name in GROUPS for kind in ("", " shared")]
TREE_PROMPT, TREE_TURN = 4096, 512
LEAST_OF_TREES = {"branched": 2.5, "step-wise": 2.5}  # the least gain of sharing
TREES = [f"{name}{kind}" for name in LEAST_OF_TREES for kind in ("", " shared")]
PEAK_FLOPS, PART_SECONDS = 989e12, 240.0
LEAST_TOKENS, LEAST_OF_ALL_KEPT, MOST_GIB, LEAST_OF_PADDED, LEAST_SHARE = 46_000, 52_000, 40.0, 1.7, 0.40
LAYERS_IN_40_GIB = 12  # of 28 recompute their MLPs
_OF_JOB = ("gpus", "zero", "steps", "tokens", "longest", "torch_attention", "lora", "load_in_4bit", "tiny")
ADAM = {"lr": 1e-6, "weight_decay": 0.0}


def make_model(folder: Path, size: str, device: str) -> int:
    """Random weights, in bf16 on a GPU; the number of parameters that compute a token."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = SHAPES[size]
    made, further = (Qwen3Config, {"head_dim": QWEN3_HEAD_WIDTH}) if size in PRIME_RL else (Qwen2Config, {})
    if size in EXPERTS:
        experts, chosen = EXPERTS[size]
        of_experts = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": intermediate}
        made, further = Qwen3MoeConfig, {"head_dim": QWEN3_HEAD_WIDTH, **of_experts}
    config = made(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        **further, intermediate_size=intermediate, vocab_size=vocabulary, tie_word_embeddings=tied,
        max_position_embeddings=max(SEQUENCES.values()),
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    share = EXPERTS[size][1] / EXPERTS[size][0] if size in EXPERTS else 1.0
    named = model.named_parameters()
    return int(sum(values.numel() * (share if ".experts." in name else 1) for name, values in named))


def mixed_lengths(longest: int, tokens: int) -> list[int]:
    """Log-normal lengths up to `longest`, that add up to `tokens`; the longest one is among them."""
    import numpy as np

    rng, lengths = np.random.default_rng(0), [min(longest, tokens)]
    while (room := tokens - sum(lengths)) > 0:
        drawn = int(np.clip(rng.lognormal(np.log(longest / 4), 0.8), longest // 16, longest))
        lengths.append(room if room - drawn < longest // 16 else drawn)
    return lengths


def engine_of(job: dict[str, Any], trainer: dict[str, Any]) -> Any:
    from support.programs.trainer.training import BASE
    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    config = json.loads(json.dumps(BASE))
    config["checkpoint_root_dir"] = job["folder"]
    config["model"] = {"model_path": job["model"], "max_model_len": job["longest"], "max_prompt_tokens": 1}
    if job["lora"]:
        lora = {"lora_rank": job["lora"], "lora_alpha": 2 * job["lora"], "load_in_4bit": job["load_in_4bit"]}
        config["model"]["lora_configs"] = [lora]
    config["algorithm"] |= {"optimizer": ADAM, "kl_loss_fn": "none"}
    config["trainer"] = {"deepspeed": {"zero_stage": job["zero"]}, "grad_clip": 1.0, **trainer}
    return TrainEngine(make_plan(Config.model_validate(config)), ranks_from_environment(1), job["device"])


def timed_steps(job: dict[str, Any], lengths: list[int], step: Any) -> dict[str, Any]:
    """Medians of the steps after the first two; `step(number)` does one."""
    seconds = []
    for number in range(1, job["steps"] + 3):
        if number == 3:
            begin_peak(job["device"])
        begin = time.perf_counter()
        step(number)
        synchronise(job["device"])
        seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds[2:]), "tokens": sum(lengths), "gib": peak_gib(job["device"])}


def time_groups(job: dict[str, Any], prompt: int, response: int, trainer: dict[str, Any]) -> dict[str, Any]:
    """Four groups of eight. The tokens of each whole sequence count."""
    import numpy as np
    from trainer import make_batch

    prompt, response = (max(1, size * job["longest"] // 4096) for size in (prompt, response))
    engine = engine_of({**job, "longest": prompt + response}, trainer)
    lengths = [prompt + response] * 32

    def step(number: int) -> None:
        made = make_batch(lengths, job["vocabulary"], number)
        sequences = []
        for index, s in enumerate(made.sequences):
            first = made.sequences[index // 8 * 8].token_ids[:prompt]
            tokens = np.concatenate([first, s.token_ids[prompt:]])
            values = {"old_logprobs": np.full(response, -8, np.float32), "mask": np.ones(response, bool)}
            sequences.append(replace(s, token_ids=tokens, prompt_length=prompt, token_advantages=None, **values))
        engine.train(replace(made, sequences=tuple(sequences)), 1000)

    return timed_steps(job, lengths, step)


def time_trees(job: dict[str, Any], shape: str, trainer: dict[str, Any]) -> dict[str, Any]:
    """Eight rollouts of one prompt. The tokens of each whole sequence count."""
    from trainer import make_trees

    prompt, turn = (max(1, size * job["longest"] // 4096) for size in (TREE_PROMPT, TREE_TURN))
    engine = engine_of({**job, "longest": prompt + 4 * turn}, trainer)
    batches = [make_trees(shape, prompt, turn, job["vocabulary"], step) for step in range(1, job["steps"] + 3)]
    lengths = [sequence.length for sequence in batches[0].sequences]
    return timed_steps(job, lengths, lambda number: engine.train(batches[number - 1], 1000))


def time_engine(job: dict[str, Any], lengths: list[int], trainer: dict[str, Any]) -> dict[str, Any]:
    from trainer import make_batch

    engine = engine_of(job, trainer)
    batches = [make_batch(lengths, job["vocabulary"], number) for number in range(1, job["steps"] + 3)]
    return timed_steps(job, lengths, lambda number: engine.train(batches[number - 1], 1000))


def time_compiled(job: dict[str, Any]) -> dict[str, Any]:
    """The peer: only transformers and torch.compile, with as many tokens in rows of the longest length."""
    import torch
    from transformers import AutoModelForCausalLM

    from trinity.trainer.model.logprobs import chunked_logprobs

    cuda, longest = job["device"] == "cuda", job["longest"]
    dtype = torch.bfloat16 if cuda else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="sdpa")
    model = model.to(job["device"]).train()
    body = torch.compile(model.model, backend="inductor" if cuda else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=cuda)
    rows = max(1, job["tokens"] // longest)
    ids = torch.randint(0, job["vocabulary"], (rows, longest), device=job["device"])
    ones = torch.ones(rows * (longest - 1), device=job["device"])

    def step(number: int) -> None:
        hidden = body(input_ids=ids, use_cache=False)[0][:, :-1].flatten(0, 1)
        logprobs, _ = chunked_logprobs(hidden, model.lm_head.weight, ids[:, 1:].flatten(), ones, 1024, cuda)
        ratio = (logprobs - logprobs.detach()).exp()
        (-torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed_steps(job, [longest] * rows, step)


def synchronise(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def begin_peak(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_gib(device: str) -> float:
    import torch
    from trainer import resident

    return float(torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")) / 2**30


def one_rank(file: Path) -> None:
    """The work of each process of a part. Rank 0 writes the results."""
    import torch

    job = json.loads(file.read_text())
    if job["device"] == "cpu":
        torch.set_num_threads(1)
    if job["torch_attention"]:
        sys.modules["flash_attn"] = None  # type: ignore[assignment]
    found = {part: time_part(part, job) for part in job["parts"]}
    if int(os.environ["RANK"]) == 0:
        file.with_name("found.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def time_part(part: str, job: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    job = {**job, "longest": job["longest"] * (4 if part == "16384" else 1)}
    tokens, longest = job["tokens"] * job["gpus"], job["longest"]
    # Ranks get about the same number of tokens; a small excess must not become another micro-batch.
    most = job["tokens"] * (9 if job["gpus"] > 1 else 8) // 8
    packed = {"use_remove_padding": True, "max_token_len_per_gpu": most}
    if part == "compiled":
        return time_compiled(job)
    if part in SEQUENCES:
        length = job["longest"] if job["tiny"] else SEQUENCES[part]
        recomputed = "mlp" if part.startswith("mlp") else True
        chosen = {**packed, "max_token_len_per_gpu": length, "gradient_checkpointing": recomputed}
        return time_engine({**job, "longest": length}, [length], chosen)
    if part in ("packed", "padded"):
        lengths = np.random.default_rng(0).integers(1, longest + 1, 8 * job["tokens"] // longest).tolist()
        rows = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": job["tokens"] // longest}
        chosen = packed if part == "packed" else {"use_remove_padding": False, **rows}
        return time_engine(job, lengths, {**chosen, "gradient_checkpointing": True})
    if part in (*PROMPTS, *TREES):
        name = part.split()[0]
        chosen = {"gradient_checkpointing": "mlp", "max_token_len_per_gpu": 9 * job["tokens"] // 4}
        shared = {**packed, **chosen, "shared_prompts": part.endswith("shared")}
        return time_trees(job, name, shared) if part in TREES else time_groups(job, *GROUPS[name][:2], shared)
    checkpointing = {"full": True, "none": False, "unfused": True}.get(part, "mlp")
    trainer = {**packed, "gradient_checkpointing": checkpointing, "fused_kernels": part != "unfused"}
    if checkpointing == "mlp" and job["gpus"] == 1:
        trainer["gradient_checkpointing_layers"] = LAYERS_IN_40_GIB
    return time_engine(job, mixed_lengths(longest, tokens), trainer)


def run_parts(parts: list[str], job: dict[str, Any], seconds: float) -> Found:
    """Runs one process per rank. Returns None, with the reason on stderr, if they fail or take too long."""
    from trinity.runtime.process import free_port

    file = Path(job["folder"]) / "job.json"
    file.write_text(json.dumps({**job, "parts": parts}))
    file.with_name("found.json").unlink(missing_ok=True)
    launch = {"WORLD_SIZE": str(job["gpus"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outputs = [file.with_name(f"rank{rank}.txt").open("w+") for rank in range(job["gpus"])]
    processes = [
        subprocess.Popen([sys.executable, __file__, str(file)], stdout=output, stderr=subprocess.STDOUT,
                         env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, output in enumerate(outputs)
    ]  # fmt: skip
    end = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if file.with_name("found.json").exists() and not any(process.returncode for process in processes):
        return dict(json.loads(file.with_name("found.json").read_text()))
    for rank, output in enumerate(outputs):
        output.seek(0)
        told = output.read()[-1500:]
        print(f"{' '.join(parts)}, rank {rank}, code {processes[rank].returncode}: {told}", file=sys.stderr)
    return {}


def of_kind(args: argparse.Namespace) -> str:
    """The model, and what of it trains."""
    base = " on a base of four bits" if args.load_in_4bit else ""
    return args.size + (f", adapters of rank {args.lora}{base}" if args.lora else "")


def table(args: argparse.Namespace, found: Found, parameters: int) -> Any:
    from buffer_table import Table, at_least, at_most

    made = Table(
        f"training {of_kind(args)}, {parameters / 1e9:.3g} B parameters, on {args.gpus} GPU(s), ZeRO {args.zero}",
        ("part", "s/step", "tokens/s", "6N", "GiB", "limit", "ratio"),
        [f"{args.tokens:,} tokens a GPU and step; medians of {args.steps} steps; GRPO without a reference"],
    )
    speed = {part: seen["tokens"] / seen["seconds"] for part, seen in found.items()}
    share = {part: 6 * parameters * rate / (PEAK_FLOPS * args.gpus) for part, rate in speed.items()}
    for part, seen in found.items():
        limit, ratio = "", ""
        if part in SEQUENCES and args.size in PRIME_RL:
            limit, ratio = against_prime_rl(args.size, SEQUENCES[part], speed[part], parameters)
        elif args.lora:  # the other limits are for whole models
            pass
        elif args.size == "7B" and part in ("4096", "16384"):
            limit, ratio = f"6N >= {at_least(share[part], LEAST_SHARE)}", f"{share[part] / LEAST_SHARE:.2f}"
        elif part == "4096" and args.size not in EXPERTS:
            limit, ratio = f"tokens/s >= {at_least(speed[part], LEAST_TOKENS)}", f"{speed[part] / LEAST_TOKENS:.2f}"
        elif part == "none" and args.size == "1.5B":
            limit = f"tokens/s >= {at_least(speed[part], LEAST_OF_ALL_KEPT)}"
            ratio = f"{speed[part] / LEAST_OF_ALL_KEPT:.2f}"
        elif part.endswith(" shared") and part.split()[0] in speed:
            name = part.split()[0]
            gain, least = speed[part] / speed[name], LEAST_OF_TREES.get(name) or GROUPS[name][2]
            limit, ratio = f"of unshared >= {at_least(gain, least)}", f"{gain:.2f}"
        elif part not in ("packed", "padded", *PROMPTS, *TREES) and "4096" in speed:
            limit, ratio = "of 4096", f"{speed[part] / speed['4096']:.2f}"
        elif part == "packed" and "padded" in speed:
            gain = speed["packed"] / speed["padded"]
            limit, ratio = f"of padded >= {at_least(gain, LEAST_OF_PADDED)}", f"{gain / LEAST_OF_PADDED:.2f}"
        cells = (f"{seen['seconds']:.3f}", f"{speed[part]:,.0f}", f"{share[part]:.1%}", f"{seen['gib']:.1f}")
        made.rows.append((part, *cells, limit, ratio))
        if part == "4096" and args.size not in ("7B", *EXPERTS) and not args.lora:
            gib = seen["gib"]
            limit = f"GiB <= {at_most(gib, MOST_GIB)}"
            made.rows.append(("4096, memory", "", "", "", f"{gib:.1f}", limit, f"{gib / MOST_GIB:.2f}"))
    return made


def against_prime_rl(size: str, length: int, speed: float, parameters: int) -> tuple[str, str]:
    """The cells for the limit, with both sides' MFU, and for the ratio to prime-rl's tokens/s."""
    from buffer_table import at_least

    published: Any = PRIME_RL[size]
    _, layers, heads, *_ = SHAPES[size]
    flops = 6 * (parameters + layers * heads * QWEN3_HEAD_WIDTH * length)
    gain, theirs = speed / published["tokens/s"][length], published["tokens/s"][length]
    mfu = f"MFU {flops * speed / PEAK_FLOPS:.1%}, theirs {flops * theirs / PEAK_FLOPS:.1%}"
    return f"of prime-rl >= {at_least(gain, published['goal'])}; {mfu}", f"{gain:.2f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; by default those above")
    parser.add_argument("--size", choices=["1.5B", "7B", "7B-A1B", *PRIME_RL], default="1.5B")
    parser.add_argument("--gpus", type=int, default=1, help="each is a rank")
    parser.add_argument("--zero", type=int, choices=[0, 1, 2, 3], help="stage; default 3 on several GPUs, else 2")
    parser.add_argument("--steps", type=int, default=5, help="that count; two come before them")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters; default: 16 for Qwen3-4B, else none")
    parser.add_argument("--load-in-4bit", action="store_true", help="hold the base of the adapters in four bits")
    torchs = "PyTorch's kernel of attention, also where flash-attn-4 is installed"
    parser.add_argument("--torch-attention", action="store_true", help=torchs)
    parser.add_argument("--cpu", action="store_true", help="ranks on the CPU, in float32")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    defaults = {"1.5B": [part for part in PARTS if part not in SEQUENCES], "7B": ["4096", "16384"], "7B-A1B": ["4096"]}
    args.parts = args.parts or defaults.get(args.size, list(SEQUENCES))
    if args.lora is None:
        args.lora = PRIME_RL[args.size]["rank"] if args.size in PRIME_RL else 0
    if args.load_in_4bit and not args.lora:
        parser.error("--load-in-4bit is for the base of adapters; give --lora too")
    args.zero = args.zero if args.zero is not None else (3 if args.gpus > 1 else 2)
    args.tokens, args.longest = (16_384, 4096) if not args.tiny else (128, 32)
    if args.tiny:
        args.size, args.steps = "tiny-A" if args.size in EXPERTS else "tiny", 1
    return args


def main() -> None:
    from trinity.runtime.torch_builds import hide_unusable_companions

    hide_unusable_companions()
    if len(sys.argv) == 2 and sys.argv[1].endswith("job.json"):
        one_rank(Path(sys.argv[1]))
        return
    if sys.argv[1:2] == ["make"]:
        print(make_model(Path(sys.argv[2]), *sys.argv[3:]))
        return
    args, device = parse(), "cpu" if "--cpu" in sys.argv else "cuda"
    found: Found = {}
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        # In a separate process, whose GPU memory is free afterwards.
        make = [sys.executable, __file__, "make", f"{folder}/model", args.size, device]
        made = subprocess.run(make, stdout=subprocess.PIPE, timeout=PART_SECONDS, check=True)
        parameters = int(made.stdout.split()[-1])
        job = {"folder": folder, "model": f"{folder}/model", "device": device, "vocabulary": SHAPES[args.size][5],
               **{name: getattr(args, name) for name in _OF_JOB}}  # fmt: skip
        several = {"padding": ["padded", "packed"], "prompts": PROMPTS, "trees": TREES}
        parts = [part for name in args.parts for part in several.get(name, [name])]
        # Each in separate processes, for its memory. A tiny part measures nothing.
        for together in [parts] if args.tiny else [[part] for part in parts]:
            now = run_parts(together, job, PART_SECONDS)
            for part, seen in now.items():
                told = (
                    f"{seen['seconds']:.3f} s, {seen['tokens'] / seen['seconds']:,.0f} tokens/s, {seen['gib']:.1f} GiB"
                )
                print(f"{part}: {told}", file=sys.stderr)
            found |= now
    if not found:
        raise SystemExit("no part has ended well; see above")
    table(args, found, parameters).show()


if __name__ == "__main__":
    main()
