"""Speed of the trainer with and without padding and shared prefixes, and memory of a step. On CPUs.

    python benchmarks/trainer.py [packing] [trees] [memory] [--tiny]

packing: the same batch, lengths uniform in [1, 1024], on two ranks: a fixed number of rows padded to the longest, rows
of similar length padded, and without padding. trees: without and with shared prefixes, trees of depth three (a prompt,
then two turns after each turn) and step-wise episodes of four turns, whose sequences repeat the turns before. memory:
the peak of one step over 4 x 4096 tokens with a vocabulary of 152,064, above the model's states: weights, gradients and
Adam's two means in float32.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
PARTS = ("packing", "trees", "memory")
LEAST_OF_PADDED = 1.7
LEAST_OF_ALONE = 1.5
MOST_GIB = 1.5
MODES: dict[str, dict[str, Any]] = {
    "padded, 8 rows each": {
        "use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 8,
    },
    "padded, rows of like length": {"use_remove_padding": False, "max_token_len_per_gpu": 8192},
    "packed": {"use_remove_padding": True, "max_token_len_per_gpu": 8192},
}  # fmt: skip


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int, length: int) -> None:
    from trinity.runtime.torch_builds import hide_unusable_companions

    hide_unusable_companions()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=max(1, hidden // 64), max_position_embeddings=length,
        tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_engine(job: dict[str, Any], trainer: dict[str, Any]) -> Any:
    from support.programs.trainer.training import BASE
    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    config = json.loads(json.dumps(BASE))
    config["checkpoint_root_dir"] = job["folder"]
    config["model"] = {"model_path": job["model"], "max_model_len": job["length"], "max_prompt_tokens": 1}
    config["trainer"] = {"deepspeed": {"zero_stage": 2, "dtype": "float32"}, **trainer}
    return TrainEngine(make_plan(Config.model_validate(config)), ranks_from_environment(1), "cpu")


def make_batch(lengths: list[int], vocabulary: int, step: int) -> Any:
    """Sequences of these lengths, a quarter of each its prompt."""
    from trinity.trainer.data.batch import TrainBatch, TrainSequence

    rng = np.random.default_rng(step)
    sequences = []
    for index, length in enumerate(lengths):
        response = length - max(1, length // 4)
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        logprobs, mask = np.full(response, -np.log(vocabulary), np.float32), np.ones(response, bool)
        sequences.append(
            TrainSequence(tokens, length - response, logprobs, mask, index // 8, advantage=float(rng.normal()))
        )
    return TrainBatch(step, tuple(sequences))


def make_trees(shape: str, prompt: int, turn: int, vocabulary: int, step: int) -> Any:
    """One group of eight rollouts of three turns. branched: two turns after each; step-wise: one sequence a turn."""
    from trinity.trainer.data.batch import TrainBatch, TrainSequence

    rng = np.random.default_rng(step)

    def grown(before: np.ndarray) -> np.ndarray:
        return np.concatenate([before, rng.integers(0, vocabulary, turn)]).astype(np.int32)

    rows = [np.asarray(rng.integers(0, vocabulary, prompt), np.int32)]
    lengths = []
    if shape == "branched":
        for _ in range(3):
            rows = [grown(row) for row in rows for _ in range(2)]
        lengths = [prompt] * len(rows)
    else:
        episodes = [rows * 1 for _ in range(8)]
        for episode in episodes:
            for _ in range(4):
                episode.append(grown(episode[-1]))
        lengths = [len(row) for episode in episodes for row in episode[:-1]]
        rows = [row for episode in episodes for row in episode[1:]]
    sequences = []
    for row, begin in zip(rows, lengths, strict=True):
        response = len(row) - begin
        logprobs, mask = np.full(response, -np.log(vocabulary), np.float32), np.ones(response, bool)
        sequences.append(TrainSequence(row, begin, logprobs, mask, 0, advantage=float(rng.normal())))
    return TrainBatch(step, tuple(sequences))


def time_trees(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step by shape and mode, in turns, and the tokens of the sequences and of the rows."""
    from trinity.trainer.data.shared_prefixes import token_count

    common = {"max_token_len_per_gpu": job["length"] * 8}
    engines = {shared: make_engine(job, {**common, "shared_prompts": shared}) for shared in (False, True)}
    found: dict[str, Any] = {}
    for shape in ("branched", "step-wise"):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for step in range(1, job["steps"] + 2):
            batch = make_trees(shape, job["prompt"], job["turn"], job["vocabulary"], step)
            for shared, engine in engines.items():
                begin = time.perf_counter()
                engine.train(batch, 100)
                if step > 1:
                    seconds[shared].append(time.perf_counter() - begin)
        tokens = sum(sequence.length for sequence in batch.sequences)
        medians = [statistics.median(times) for times in seconds.values()]
        found[shape] = [tokens, token_count(batch.sequences), *medians]
    return found


def time_modes(job: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each step of each mode, in turns. The first step does not count."""
    engines = {mode: make_engine(job, trainer) for mode, trainer in MODES.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for step in range(1, job["steps"] + 2):
        for mode, engine in engines.items():
            batch = make_batch(job["lengths"], job["vocabulary"], step)
            begin = time.perf_counter()
            engine.train(batch, 100)
            if step > 1:
                seconds[mode].append(time.perf_counter() - begin)
    return seconds


def measure_growth(job: dict[str, Any]) -> dict[str, float]:
    """GiB of the model's states, and the peak of the second step above the memory before it."""
    import torch

    torch.set_num_threads(2)
    engine = make_engine(job, {"use_remove_padding": True, "max_token_len_per_gpu": sum(job["lengths"])})
    engine.train(make_batch([8] * 2, job["vocabulary"], 1), 100)
    parameters = sum(parameter.numel() for parameter in engine.policy.parameters())
    gradients = sum(p.numel() for p in engine.policy.parameters() if p.grad is None) * 4
    before = resident("VmRSS") + gradients
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin = time.perf_counter()
    engine.train(make_batch(job["lengths"], job["vocabulary"], 2), 100)
    seconds = time.perf_counter() - begin
    growth = resident("VmHWM") - before
    return {"own": 16 * parameters / 2**30, "growth": growth / 2**30, "seconds": seconds}


def resident(name: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at their peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def run_ranks(part: str, ranks: int, job: dict[str, Any], hidden: int, layers: int) -> Any:
    from support.programs.trainer.engine_actions import run_module

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", hidden, layers, job["vocabulary"], job["length"])
        file = Path(folder) / "job.json"
        file.write_text(json.dumps({**job, "part": part, "folder": folder, "model": f"{folder}/model"}))
        run_module("trainer", file, ranks, 3000)
        return json.loads((Path(folder) / "found.json").read_text())


def show_packing(args: argparse.Namespace) -> None:
    from buffer_table import Table, at_least

    rng = np.random.default_rng(0)
    lengths = [int(length) for length in rng.integers(1, args.longest + 1, args.sequences)]
    job = {"lengths": lengths, "length": args.longest, "vocabulary": args.vocabulary, "steps": args.steps}
    seconds = run_ranks("packing", 2, job, args.hidden, args.layers)
    tokens = sum(lengths)
    table = Table(
        f"packing: {len(lengths)} sequences of 1 to {args.longest} tokens, {tokens:,} in all, 2 ranks",
        ("micro-batches", "s/step", "tokens/s", "of padded", "limit"),
    )
    first = statistics.median(seconds[next(iter(MODES))])
    for mode, times in seconds.items():
        median = statistics.median(times)
        limit = at_least(first / median, LEAST_OF_PADDED) if mode == "packed" else ""
        table.rows.append((mode, f"{median:.2f}", f"{tokens / median:,.0f}", f"{first / median:.2f}", limit))
    table.show()


def show_trees(args: argparse.Namespace) -> None:
    from buffer_table import Table, at_least

    job = {"prompt": args.prompt, "turn": args.turn, "length": args.prompt + 4 * args.turn, "steps": args.steps,
           "vocabulary": args.vocabulary}  # fmt: skip
    found = run_ranks("trees", 1, job, args.hidden, args.layers)
    table = Table(
        f"trees: 8 rollouts, a prompt of {args.prompt} tokens and turns of {args.turn}, one thread",
        ("shape", "tokens", "in rows", "tokens/s alone", "tokens/s shared", "ratio", "limit"),
    )
    for shape, (tokens, distinct, alone, shared) in found.items():
        limit = at_least(alone / shared, LEAST_OF_ALONE)
        speeds = f"{tokens / alone:,.0f}", f"{tokens / shared:,.0f}", f"{alone / shared:.2f}"
        table.rows.append((shape, f"{tokens:,}", f"{distinct:,}", *speeds, limit))
    table.show()


def show_memory(args: argparse.Namespace) -> None:
    from buffer_table import Table, at_most

    lengths = [args.memory_length] * 4
    job = {"lengths": lengths, "length": args.memory_length, "vocabulary": args.memory_vocabulary}
    found = run_ranks("memory", 1, job, args.memory_hidden, 2)
    logits = sum(lengths) * args.memory_vocabulary * 4 / 2**30
    table = Table(
        f"memory: one step over 4 x {args.memory_length} tokens in one micro-batch, vocabulary "
        f"{args.memory_vocabulary:,}, {found['seconds']:.0f} s",
        ("GiB", "own states", "all logits", "growth", "limit"),
        notes=["all logits: one float32 copy of them, which never exists"],
    )
    limit = at_most(found["growth"], MOST_GIB)
    table.rows.append(("", f"{found['own']:.2f}", f"{logits:.2f}", f"{found['growth']:.2f}", limit))
    table.show()


def one_rank(file: Path) -> None:
    """The work of each process that `run_ranks` starts."""
    import torch

    torch.set_num_threads(1)
    job = json.loads(file.read_text())
    found = {"packing": time_modes, "trees": time_trees, "memory": measure_growth}[job["part"]](job)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        (Path(job["folder"]) / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].endswith("job.json"):
        one_rank(Path(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; all if none is named")
    for name, value in {"sequences": 64, "longest": 1024, "steps": 3, "hidden": 128, "layers": 4, "vocabulary": 2048,
                        "prompt": 1024, "turn": 256, "memory-length": 4096, "memory-vocabulary": 152_064,
                        "memory-hidden": 128}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.tiny:
        args.sequences, args.longest, args.steps, args.memory_length, args.memory_vocabulary = 8, 32, 1, 64, 2048
        args.prompt, args.turn = 32, 16
    for part, show in {"packing": show_packing, "trees": show_trees, "memory": show_memory}.items():
        if part in (args.parts or PARTS):
            show(args)


if __name__ == "__main__":
    main()
