"""Engines with the mistakes that the cases are there to find."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.fakes.explorers.member_engine import MemberEngine, logprobs, read_weights
from trinity.data.experience import SamplingParams
from trinity.explorer.weights.loader import base_folder


class SamplesByTheModelItStartedWith(MemberEngine):
    """Its canaries are right, as an engine's that answers from blocks of older weights."""

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Any = ()) -> list[Any]:
        old = read_weights(base_folder(self.options.model).glob("*.safetensors"))
        made = await super().generate(prompt_token_ids, sampling)
        for completion in made:
            tokens = [prompt_token_ids[-1], *completion.token_ids.tolist()]
            completion.logprobs[:] = logprobs(old, tokens)
        return made


class LeavesOutATensor(MemberEngine):
    """The last one of every load stays what it was."""

    def _take(self, update: dict[str, Any]) -> None:
        kept = {name: np.array(value) for name, value in self._weights.items()}
        super()._take(update)
        last = sorted(kept)[-1]
        self._weights[last] = kept[last]
