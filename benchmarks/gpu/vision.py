"""A vision-language model on images and on text: tokens per second of rollout and trainer. One GPU, seven minutes.

    python benchmarks/gpu/vision.py                a Qwen2.5-VL of 3 B with random weights
    python benchmarks/gpu/vision.py rollout        only this part (rollout, trainer, language)
    python benchmarks/gpu/vision.py --cpu --tiny

The trainer's 3.75 B parameters with Adam need more than the 80 GB of an H100; an H200 has room. `--recompute layers
--freeze` takes 53 GiB, without activations, by its estimate. Without a compile cache an engine takes more than two
minutes to start; `--eager` does not compile.

Text has prompts of as many tokens as those with an image, of 448 x 448 pixels, which is 256 of them. rollout: the
explorer's engine samples --group responses of --response tokens for each of --tasks prompts, whose images differ.
trainer: steps of GRPO on packed sequences of --length tokens, --batch tokens a step, an image for each --group of
sequences. language: the same text by a language model of the same shape, which has our kernels.
"""

import argparse
import asyncio
import io
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from own_process import FOUND, found_by

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

PARTS = ("rollout", "trainer", "language")
PART_SECONDS = {"make": 120.0, "rollout": 400.0, "trainer": 150.0, "language": 100.0}
KINDS = ("text", "images")
SHAPE = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
         "intermediate_size": 11008, "vocab_size": 151_936}  # fmt: skip
TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "window_size": 112,
         "fullatt_block_indexes": [7, 15, 23, 31]}  # fmt: skip
TINY_SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
TINY_TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "window_size": 32,
              "fullatt_block_indexes": [1]}  # fmt: skip
WORK = {"tasks": 64, "group": 8, "prompt": 320, "response": 256, "length": 1024, "batch": 16_384, "steps": 5}
TINY_WORK = {"tasks": 2, "group": 2, "prompt": 24, "response": 4, "length": 32, "batch": 128, "steps": 1}
SIDE, TINY_SIDE = 448, 32  # pixels of an image

Found = dict[str, float]


def make(args: argparse.Namespace) -> Found:
    """The model and, for `language`, its language model, in bf16 on a GPU; billions of parameters of each."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

    example = runpy.run_path(str(ROOT / "examples/vision/make_model.py"))
    tokenizer, shape = example["make_tokenizer"](), TINY_SHAPE if args.tiny else SHAPE
    heads = shape["hidden_size"] // shape["num_attention_heads"] // 2
    rope = {"rope_type": "default", "rope_theta": 1e6}
    sections = [heads - 2 * (3 * heads // 8), 3 * heads // 8, 3 * heads // 8]
    common = {**shape, "max_position_embeddings": 32_768, "bos_token_id": None,
              "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
    of = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in example["VISION"]}
    patch, tower = (4, TINY_TOWER) if args.tiny else (14, TOWER)
    seeing = Qwen2_5_VLConfig(
        text_config={**common, "rope_parameters": {**rope, "mrope_section": sections}}, tie_word_embeddings=True,
        vision_config={**tower, "out_hidden_size": shape["hidden_size"], "patch_size": patch, "spatial_merge_size": 2},
        image_token_id=of["image_pad"], video_token_id=of["video_pad"],
        vision_start_token_id=of["vision_start"], vision_end_token_id=of["vision_end"],
    )  # fmt: skip
    reading = Qwen2Config(**common, rope_parameters=rope, tie_word_embeddings=True)
    files = {**example["processor_files"](), "patch_size": patch, "min_pixels": 4 * patch**2,
             "max_pixels": 1024 * 4 * patch**2}  # fmt: skip
    found = {}
    made = {"seeing": (Qwen2_5_VLForConditionalGeneration, seeing)}
    if "language" in (args.parts or PARTS):
        made["reading"] = Qwen2ForCausalLM, reading
    for name, (kind, config) in made.items():
        with torch.device(args.device):
            model = kind(config).to(args.dtype)
        model.save_pretrained(args.folder / name)
        tokenizer.save_pretrained(args.folder / name)
        found[name] = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    (args.folder / "seeing/preprocessor_config.json").write_text(json.dumps(files))
    return found


def pictures(count: int, side: int, salt: int) -> list[bytes]:
    """Files of images of noise, all different."""
    import numpy as np
    from PIL import Image

    found = []
    for index in range(count):
        noise, file = np.random.default_rng([salt, index]).integers(0, 256, (side, side, 3), np.uint8), io.BytesIO()
        Image.fromarray(noise).save(file, "png", compress_level=1)
        found.append(file.getvalue())
    return found


class Prompts:
    """Token ids of prompts, --prompt of them each."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        from trinity.data.vision import image_rules

        found = image_rules(str(args.folder / "seeing"))
        assert found is not None
        self.args, self.rules = args, found
        tokenizer = AutoTokenizer.from_pretrained(args.folder / "seeing")
        begin, end = tokenizer.encode("<|vision_start|><|vision_end|>", add_special_tokens=False)
        self.shown = [begin, found.token, end]
        self.letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz0123456789", add_special_tokens=False)

    def of(self, image: bytes | None, seed: int) -> list[int]:
        """With the placeholders of the image at the beginning, if there is one; the rest is text."""
        import numpy as np

        from trinity.data.images import expanded

        head = [] if image is None else expanded(self.shown, [image], self.rules)
        assert len(head) < self.args.prompt
        drawn = np.random.default_rng(seed).choice(self.letters, self.args.prompt - len(head))
        return [*head, *(int(token) for token in drawn)]

    def placed(self, prompt: list[int], image: bytes | None) -> Any:
        from trinity.data.images import placed

        return () if image is None else placed(prompt, (image,), self.rules)


async def rollout(args: argparse.Namespace) -> Found:
    """Tokens a second that the explorer's engine samples, after a warm-up with other prompts and other images."""
    from trinity.data.experience import SamplingParams
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions

    prompts = Prompts(args)
    given = {} if args.vit_attention is None else {"mm_encoder_attn_backend": args.vit_attention}
    model, length = str(args.folder / "seeing"), args.prompt + args.response + 1
    engine = await Engine.start(
        EngineOptions(model, args.device, length, images=prompts.rules, engine_args=given, enforce_eager=args.eager),
    )
    sampling = SamplingParams(max_tokens=args.response, n=args.group, ignore_eos=True)

    async def seconds(kind: str, salt: int) -> float:
        shown: Sequence[bytes | None] = [None] * args.tasks
        if kind == "images":
            shown = pictures(args.tasks, args.side, salt)
        asked = [prompts.of(image, salt * args.tasks + index) for index, image in enumerate(shown)]
        begin = time.perf_counter()
        made = await asyncio.gather(
            *(engine.generate(ids, sampling, prompts.placed(ids, image))
              for ids, image in zip(asked, shown, strict=True))
        )  # fmt: skip
        took = time.perf_counter() - begin
        assert sum(len(completion.token_ids) for group in made for completion in group) == args.sampled
        return took

    try:
        for kind in KINDS:
            await seconds(kind, 1)
        times = {kind: [await seconds(kind, salt) for salt in (2, 3)] for kind in KINDS}
    finally:
        engine.close()
    return {kind: args.sampled / statistics.mean(took) for kind, took in times.items()}


def batch(args: argparse.Namespace, prompts: Prompts, shown: Sequence[bytes | None], step: int) -> Any:
    """--batch tokens in groups of --group sequences, each group with one of the images `shown`, or none."""
    import numpy as np

    from trinity.trainer.data.batch import TrainBatch, TrainSequence

    rng, response = np.random.default_rng(step), args.length - args.prompt
    sequences = []
    for index in range(args.batch // args.length):
        image = shown[index // args.group]
        prompt = prompts.of(image, step * 1000 + index // args.group)
        tokens = np.array([*prompt, *rng.choice(prompts.letters, response)], np.int32)
        logprobs = np.full(response, -np.log(args.vocabulary), np.float32)
        sequences.append(
            TrainSequence(tokens, args.prompt, logprobs, np.ones(response, bool), index // args.group,
                          advantage=float(rng.normal()), images=prompts.placed(prompt, image))
        )  # fmt: skip
    return TrainBatch(step, tuple(sequences))


def trainer(args: argparse.Namespace, name: str, kinds: Sequence[str]) -> Found:
    """Tokens a second of a step with text and with images, in turns; the first two of each do not count."""
    import torch

    from support.programs.trainer.training import BASE
    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    config = json.loads(json.dumps(BASE))
    config["checkpoint_root_dir"] = str(args.folder / f"job of {name}")
    config["model"] = {"model_path": str(args.folder / name), "max_model_len": args.length, "max_prompt_tokens": 1}
    config["algorithm"] |= {"optimizer": {"lr": 1e-6, "weight_decay": 0.0}, "kl_loss_fn": "none"}
    # A little more than a step has, so that it is one micro-batch.
    most = args.batch * 9 // 8
    config["trainer"] = {"deepspeed": {"zero_stage": 2}, "use_remove_padding": True, "max_token_len_per_gpu": most,
                         "gradient_checkpointing": {"mlp": "mlp", "layers": True, "auto": None}[args.recompute],
                         "freeze_vision_tower": args.freeze and name == "seeing"}  # fmt: skip
    engine = TrainEngine(make_plan(Config.model_validate(config)), ranks_from_environment(1), args.device)
    prompts, groups = Prompts(args), -(-args.batch // args.length // args.group)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(1, args.steps + 3):
        for kind in kinds:
            shown = pictures(groups, args.side, step) if kind == "images" else [None] * groups
            made = batch(args, prompts, shown, step)
            begin = time.perf_counter()
            engine.train(made, 1000)
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds[kind].append(time.perf_counter() - begin)
    return {kind: args.batch / statistics.median(took[2:]) for kind, took in seconds.items()}


def part(args: argparse.Namespace) -> Found:
    if args.process == "rollout":
        return asyncio.run(rollout(args))
    if args.process == "language":
        return trainer(args, "reading", ["text"])
    return make(args) if args.process == "make" else trainer(args, "seeing", KINDS)


def show(args: argparse.Namespace, sizes: Found, found: dict[str, Found]) -> None:
    from buffer_table import Table

    work = f"{args.tasks} prompts x {args.group} of {args.prompt} + {args.response} tokens"
    table = Table(
        f"images against text alone: {sizes['seeing']:.3g} B parameters, on {args.device}",
        ("part", "text, tokens/s", "images, tokens/s", "ratio"),
        [f"rollout: {work}, sampled tokens; trainer: {args.batch:,} tokens a step, sequences of {args.length:,}"],
    )
    for name, rates in found.items():
        cells = [f"{rates[kind]:,.0f}" if kind in rates else "" for kind in KINDS]
        of_text = "" if "images" not in rates else f"{rates['images'] / rates['text']:.2f}"
        label = f"{name}, {sizes['reading']:.3g} B" if name == "language" else name
        table.rows.append((label, *cells, of_text))
    if {"trainer", "language"} <= found.keys():
        ratio = found["trainer"]["images"] / found["language"]["text"]
        table.rows.append(("trainer with images, of language", "", "", f"{ratio:.2f}"))
    table.show()


def parsed() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; by default all")
    for name, value in WORK.items():
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--vit-attention", help="vLLM's mm_encoder_attn_backend, as TORCH_SDPA; by default its choice")
    made.add_argument(
        "--recompute",
        choices=["mlp", "layers", "auto"],
        default="mlp",
        help="activations that the trainer recomputes; layers need about 14 GiB less than mlp",
    )
    made.add_argument("--eager", action="store_true", help="vLLM without compilation and graphs")
    made.add_argument("--freeze", action="store_true", help="freeze the vision tower in the trainer: about 10 GiB less")
    made.add_argument("--cpu", action="store_true", help="on the CPU, in float32")
    made.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    made.add_argument("--process", choices=["make", *PARTS], help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args()
    if unknown := sorted(set(args.parts) - set(PARTS)):
        made.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.tiny:
        vars(args).update(TINY_WORK)
    args.device, args.side = "cpu" if args.cpu else "cuda", TINY_SIDE if args.tiny else SIDE
    args.vocabulary = (TINY_SHAPE if args.tiny else SHAPE)["vocab_size"]
    args.sampled = args.tasks * args.group * args.response
    return args


def main() -> None:
    args = parsed()
    if args.process:
        import torch

        from trinity.runtime.torch_builds import hide_unusable_companions

        hide_unusable_companions()
        args.dtype = torch.float32 if args.cpu else torch.bfloat16
        print(f"\n{FOUND}{json.dumps(part(args))}", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="vision-", ignore_cleanup_errors=True) as folder:
        given = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"} if args.cpu else {}
        found = {
            name: found_by(name, "--folder", folder, limit_seconds=PART_SECONDS[name], **given)
            for name in ("make", *(name for name in PARTS if name in (args.parts or PARTS)))
        }
    show(args, found.pop("make"), found)


if __name__ == "__main__":
    main()
