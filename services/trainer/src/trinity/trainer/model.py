"""The policy: a Hugging Face causal language model whose head gives log-probabilities instead of logits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.logprobs import chunked_logprobs


class _Head(nn.Module):
    """Takes the output projection's place and owns its weight, so that ZeRO-3 gathers it when it is called."""

    def __init__(self, projection: nn.Linear, chunk: int) -> None:
        super().__init__()
        self.weight = projection.weight
        self.chunk = chunk

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_logprobs(hidden, self.weight, targets, temperatures, self.chunk)


class PolicyModel(nn.Module):
    """forward gives the log-probability of every next token.

    B rows, L positions. Parameter names are the checkpoint's own behind the prefix `model.`.
    """

    PREFIX = "model."

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__()
        projection = model.get_output_embeddings()
        config = model.config
        if not isinstance(projection, nn.Linear) or projection.bias is not None:
            raise InvalidInput("model.model_path", "its output projection is not a plain matrix; not supported")
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, name, None):
                raise InvalidInput("model.model_path", f"its config has {name}, which is not supported")
        self.model: Any = model
        model.set_output_embeddings(_Head(projection, chunk))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of token t + 1 at position t, and the entropy there; both float32 [B, L - 1].

        input_ids int64 [B, L]; attention_mask [B, L], 1 for tokens; temperatures float32 [B].
        """
        model = self.model
        hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0][:, :-1]
        rows, length, width = hidden.shape
        flat_temperatures = temperatures[:, None].expand(rows, length).reshape(-1)
        head = model.get_output_embeddings()
        logprobs, entropy = head(hidden.reshape(-1, width), input_ids[:, 1:].reshape(-1), flat_temperatures)
        return logprobs.view(rows, length), entropy.view(rows, length)

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their name in the checkpoint, in checkpoint order, tied ones once."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix(self.PREFIX), parameter


def load_policy(config: ModelConfig, dtype: torch.dtype, chunk: int, gradient_checkpointing: bool) -> PolicyModel:
    """The model in `model_path`. Raises InvalidInput if transformers cannot load it."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model_path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise InvalidInput("model.model_path", f"{config.model_path!r} cannot be loaded: {error}") from None
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return PolicyModel(model, chunk)
