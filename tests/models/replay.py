"""A mixture whose gates are undecided, and how far the trainer's log-probabilities are from the engine's."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from models.families import FAMILIES, make_model

from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Experience, SamplingParams
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model.policy import load_policy
from trinity.trainer.model.routers import gates_of

SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
SAMPLED = 24


def make_nearly_equal(folder: Path) -> None:
    """A mixture whose experts differ, and whose gates are undecided between each four of eight."""
    family = next(family for family in FAMILIES if family.kind == "qwen3_moe")
    model = make_model(family, folder, SIZES)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, gate in gates_of(model.model):
            pair = torch.randn(2, gate.weight.shape[1], generator=generator)
            gate.weight.copy_(pair.repeat_interleave(4, 0))
            gate.weight.add_(torch.randn(gate.weight.shape, generator=generator) * 1e-8)
        for name, weight in model.named_parameters():
            if "experts" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Gap:
    """Absolute differences of log-probabilities of all sampled tokens, and bytes of a token's record."""

    without: np.ndarray
    replayed: np.ndarray
    bytes_a_token: float

    def __str__(self) -> str:
        means, most = ([f(one) for one in (self.without, self.replayed)] for f in (np.mean, np.max))
        return (
            f"{len(self.without)} tokens: {means[0]:.2e} in the mean, {most[0]:.2e} at most without replay, "
            f"{means[1]:.2e}, {most[1]:.2e} with it; {self.bytes_a_token:.1f} of 8 bytes a token"
        )


def differences(
    folder: Path, experiences: list[Experience], replay: bool, device: str, dtype: torch.dtype
) -> np.ndarray:
    """Absolute differences between the trainer's log-probabilities and the engine's, of all sampled tokens."""
    sequences = [
        TrainSequence(
            one.token_ids, one.prompt_length, one.logprobs, one.action_mask, group=0,
            routes=one.routes if replay else None,
        )
        for one in experiences
    ]  # fmt: skip
    policy = load_policy(ModelConfig(model_path=str(folder)), dtype, 64, packed=True, replay=True).to(device).eval()
    with torch.no_grad():
        found, _ = policy(collate(sequences, 0, packed=True).to(torch.device(device)))
    rows = zip(found.float().cpu(), sequences, strict=True)
    return np.concatenate([np.abs(row[: s.response_length].numpy() - s.old_logprobs)[s.mask] for row, s in rows])


async def gap_of(folder: Path, device: str, dtype: str = "float32") -> Gap:
    """Samples talks of two turns with a model that is made in `folder`."""
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions
    from trinity.explorer.workflows.conversation import Conversation

    make_nearly_equal(folder)
    options = EngineOptions(
        str(folder), device, 128, dtype=dtype, max_num_seqs=3, routes=True, gpu_memory_utilization=0.1,
        engine_args={"skip_tokenizer_init": True} | ({} if device == "cpu" else {"kv_cache_memory_bytes": 2**30}),
    )  # fmt: skip
    started = await Engine.start(options)
    try:
        rng, experiences = np.random.default_rng(0), list[Experience]()
        for length in (3, 40):
            prompt = tuple(rng.integers(2, 120, length).tolist())
            sampling = SamplingParams(max_tokens=SAMPLED, n=4, ignore_eos=True)
            for made in await started.generate(prompt, sampling):
                talk = Conversation(prompt).replied(made).told(rng.integers(2, 120, 5).tolist())
                (then,) = await started.generate(talk.tokens, SamplingParams(max_tokens=SAMPLED // 2, ignore_eos=True))
                experiences.append(talk.replied(then).experience(len(experiences), 1.0))
                experiences.append(Conversation(prompt).replied(made).experience(len(experiences), 1.0))
    finally:
        started.close()
    for one in experiences:
        one.check("experience")
        assert one.routes is not None
        assert one.routes.ids(len(one.token_ids)).shape == (len(one.token_ids) - 1, 4, 2)
    tokens = sum(len(one.token_ids) - 1 for one in experiences)
    size = sum(len(one.routes.data) for one in experiences if one.routes is not None)
    without, replayed = (
        differences(folder, experiences, replay, device, getattr(torch, dtype)) for replay in (False, True)
    )
    return Gap(without, replayed, size / tokens)
