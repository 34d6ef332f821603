"""Where experts are nearly equal, engine and trainer choose different ones; replayed routes close the gap."""

from pathlib import Path

import numpy as np
import pytest
import torch
from models.families import FAMILIES, make_model

from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Experience, SamplingParams
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model.policy import load_policy
from trinity.trainer.model.routers import gates_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

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


def differences(folder: Path, experiences: list[Experience], replay: bool) -> np.ndarray:
    """Absolute differences between the trainer's log-probabilities and the engine's, of all sampled tokens."""
    sequences = [
        TrainSequence(
            one.token_ids, one.prompt_length, one.logprobs, one.action_mask, group=0,
            routes=one.routes if replay else None,
        )
        for one in experiences
    ]  # fmt: skip
    policy = load_policy(ModelConfig(model_path=str(folder)), torch.float32, 64, packed=True, replay=True).eval()
    with torch.no_grad():
        found, _ = policy(collate(sequences, 0, packed=True))
    rows = zip(found, sequences, strict=True)
    return np.concatenate([np.abs(row[: s.response_length].numpy() - s.old_logprobs)[s.mask] for row, s in rows])


async def test_the_gap_is_ten_times_smaller(tmp_path: Path) -> None:
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions
    from trinity.explorer.workflows.conversation import Conversation

    make_nearly_equal(tmp_path)
    options = EngineOptions(
        str(tmp_path), "cpu", 128, max_num_seqs=3, routes=True, engine_args={"skip_tokenizer_init": True}
    )
    engine = await Engine.start(options)
    try:
        rng, experiences = np.random.default_rng(0), list[Experience]()
        for length in (3, 40):
            prompt = tuple(rng.integers(2, 120, length).tolist())
            sampling = SamplingParams(max_tokens=SAMPLED, n=4, ignore_eos=True)
            for made in await engine.generate(prompt, sampling):
                talk = Conversation(prompt).replied(made).told(rng.integers(2, 120, 5).tolist())
                (then,) = await engine.generate(talk.tokens, SamplingParams(max_tokens=SAMPLED // 2, ignore_eos=True))
                experiences.append(talk.replied(then).experience(len(experiences), 1.0))
                experiences.append(Conversation(prompt).replied(made).experience(len(experiences), 1.0))
    finally:
        engine.close()
    for one in experiences:
        one.check("experience")
        assert one.routes is not None
        assert one.routes.ids(len(one.token_ids)).shape == (len(one.token_ids) - 1, 4, 2)
    tokens = sum(len(one.token_ids) - 1 for one in experiences)
    size = sum(len(one.routes.data) for one in experiences if one.routes is not None)
    without, replayed = (differences(tmp_path, experiences, replay) for replay in (False, True))
    print(f"{len(without)} tokens: {without.mean():.2e} in the mean, {without.max():.2e} at most without replay, "
          f"{replayed.mean():.2e}, {replayed.max():.2e} with it; {size / tokens:.1f} of 8 bytes a token")  # fmt: skip
    assert without.mean() > 10 * replayed.mean()
    assert replayed.max() < 1e-3
