"""JSON bodies of the `tinker` client (0.38) that become commands. Unknown fields and values are refused by name."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trinity.data.experience import MOST_ROLLOUTS
from trinity.runtime.errors import InvalidInput

_MOST_NOTE_BYTES = 16 * 1024


def _check_size(values: Any) -> Any:
    if len(json.dumps(values)) > _MOST_NOTE_BYTES:
        raise ValueError(f"at most {_MOST_NOTE_BYTES} bytes are allowed, since they stay in the log")
    return values


_SHORT = AfterValidator(_check_size)
_ID = Annotated[str, Field(min_length=1, max_length=200)]
_NAME = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$")]

_METADATA = Annotated[dict[str, Any] | None, _SHORT]
_HOUR, _TEN_YEARS = 3600, 10 * 366 * 24 * 3600
_TTL = Annotated[int, Field(ge=_HOUR, le=_TEN_YEARS)] | None
_MOST_TOP = 20  # vLLM's own limit
_MOST_NUMBER = 2**31 - 1
_SEQ_ID = Annotated[int, Field(ge=1, le=_MOST_NUMBER)]
_NUMBER = Annotated[int, Field(ge=0, le=_MOST_NUMBER)]  # of a model or a sampling session


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class LoraConfig(Body):
    rank: int = Field(ge=1)
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    train_unembed: bool = True  # the client's default; the output projection is not adapted, and each session is told
    train_mlp: bool = True
    train_attn: bool = True


class AdamW(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: _ID
    model_seq_id: _NUMBER
    base_model: str
    user_metadata: _METADATA = None
    lora_config: LoraConfig
    optimizer_config: AdamW = AdamW()
    type: Literal["create_model"] = "create_model"


class AdamParams(Body):
    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStep(Body):
    adam_params: AdamParams
    model_id: _ID
    seq_id: _SEQ_ID
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Body):
    model_id: _ID
    path: _NAME
    seq_id: _SEQ_ID
    ttl_seconds: _TTL = None
    overwrite: bool = False
    user_metadata: _METADATA = None
    type: Literal["save_weights"] = "save_weights"


class LoadWeights(Body):
    """Into the model `model_id`, or as a new model `model_seq_id` of a session."""

    model_id: _ID | None = None
    seq_id: _SEQ_ID | None = None
    session_id: _ID | None = None
    model_seq_id: _NUMBER | None = None
    base_model: str | None = None
    user_metadata: _METADATA = None
    path: str = Field(max_length=400)
    optimizer: bool
    optimizer_config: AdamW | None = None
    weights_access_token: None = None
    type: Literal["load_weights"] = "load_weights"


class SaveSampler(Body):
    """With a name as `path`, or for a sampling session of the number."""

    model_id: _ID
    path: _NAME | None = None
    sampling_session_seq_id: _NUMBER | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: _SEQ_ID
    ttl_seconds: _TTL = None
    user_metadata: _METADATA = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class CreateSampler(Body):
    session_id: _ID
    sampling_session_seq_id: _NUMBER
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class EncodedText(Body):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Body):
    chunks: list[EncodedText]


class SamplingSettings(Body):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1, le=2**31 - 1)
    top_p: float = Field(1.0, gt=0, le=1)


class AskSamples(Body):
    sampling_session_id: _ID
    seq_id: int = Field(ge=0, le=2**63 - 1)
    num_samples: int = Field(1, ge=1, le=MOST_ROLLOUTS)
    prompt: Prompt
    sampling_params: SamplingSettings
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=_MOST_TOP)
    topk_sample_logprobs: int = Field(0, ge=0, le=_MOST_TOP)
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class Page(Body):
    """The query of a list, whose numbers are texts."""

    model_config = ConfigDict(extra="forbid", strict=False)

    limit: int = Field(100, ge=0)
    offset: int = Field(0, ge=0)


class CreateSession(Body):
    model_config = ConfigDict(extra="ignore", strict=True)

    tags: Annotated[list[str], _SHORT] = []
    user_metadata: _METADATA = None


B = TypeVar("B", bound=Body)


def read(kind: type[B], values: Any) -> B:
    """Raises InvalidInput with the first field that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))[:200] or "body"
        given = "" if first["type"] == "missing" else f"is {str(first.get('input'))[:100]!r}: "
        raise InvalidInput(field, f"{given}{first['msg']}") from None
