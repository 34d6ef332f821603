"""Trinity-RFT's experience: what a workflow returns. R: response tokens, L: prompt and response."""

import importlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EID:
    """Which experience it is: `run` is the rollout in its group, `step` its place there. Trinity sets the others."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:6])

    @property
    def tid(self) -> str:
        return f"{self.batch}/{self.task}"

    @property
    def rid(self) -> str:
        return f"{self.tid}/{self.run}"

    @property
    def sid(self) -> str:
        return f"{self.tid}/{self.step}"

    @property
    def uid(self) -> str:
        return f"{self.rid}/{self.step}/{self.suffix}"


@dataclass(kw_only=True, eq=False)
class Experience:
    """tokens int32 [L], logprobs float32 [R], action_mask bool [R], teacher_logprobs float32 [R]: torch's tensors.

    Lists are taken, too. Without action_mask, every token of the response is trained. `reward` is needed when a
    workflow returns it. Trinity refuses the fields below `multi_modal_data` when they are set.
    """

    tokens: Any
    eid: Any = None
    prompt_length: int = 1
    logprobs: Any = None
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    response_text: str | None = None
    prompt_text: str | None = None
    action_mask: Any = None
    truncate_status: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    teacher_logprobs: Any = None
    multi_modal_data: Any = None
    multi_modal_inputs: Any = None
    token_level_reward: Any = None
    advantages: Any = None
    returns: Any = None
    chosen: Any = None
    rejected: Any = None
    chosen_messages: list[dict[str, Any]] | None = None
    rejected_messages: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        torch: Any = importlib.import_module("torch")  # of the service that runs the plugin
        self.eid = EID(**self.eid) if isinstance(self.eid, dict) else self.eid or EID()
        self.info, self.metrics = self.info or {}, self.metrics or {}
        self.tokens = torch.as_tensor(self.tokens, dtype=torch.int32)
        if self.logprobs is not None:
            self.logprobs = torch.as_tensor(self.logprobs, dtype=torch.float32)
        if self.action_mask is None:
            self.action_mask = torch.ones(max(len(self.tokens) - self.prompt_length, 0), dtype=torch.bool)
        self.action_mask = torch.as_tensor(self.action_mask, dtype=torch.bool)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


def group_by(experiences: Sequence[Any], id_type: str = "task") -> dict[str, list[Any]]:
    """Groups experiences by task, by run (all steps of a rollout) or by step (that step of all rollouts)."""
    names = {"task": "tid", "run": "rid", "step": "sid"}
    if id_type not in names:
        raise ValueError(f"id_type is {id_type!r}, must be one of {', '.join(names)}")
    found: dict[str, list[Any]] = {}
    for experience in experiences:
        found.setdefault(getattr(experience.eid, names[id_type]), []).append(experience)
    return found
