"""The parts of Trinity-RFT's configuration that a workflow's task has."""

from dataclasses import dataclass
from types import SimpleNamespace


class FormatConfig(SimpleNamespace):
    """The taskset's `format`: prompt_key, response_key, system_prompt, reply_prefix, ... as attributes."""


@dataclass
class GenerationConfig:
    """Sampling parameters of `n` replies to one prompt."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    repetition_penalty: float = 1.0
    logprobs: int = 0  # has no effect: those of the sampled tokens are always there
    n: int = 1
