"""ATIF, the form in which Harbor keeps what an agent did: RFC 0001 of harbor-framework/harbor, versions 1.0 to 1.8."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from trinity.runtime.errors import InvalidInput

VERSION = "ATIF-v1.8"
_VERSIONS = [f"ATIF-v1.{minor}" for minor in range(9)]
_MOST_BYTES = 512 * 1024 * 1024

Extra = dict[str, Any] | None


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Content(_Part):
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: dict[str, Any] | None = None


class ToolCall(_Part):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Extra = None


class Result(_Part):
    source_call_id: str | None = None
    content: str | list[Content] | None = None
    subagent_trajectory_ref: list[dict[str, Any]] | None = None
    extra: Extra = None


class Observation(_Part):
    results: list[Result]


class Metrics(_Part):
    """prompt_token_ids [P], completion_token_ids and logprobs [C], in nats."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[FiniteFloat] | None = None
    extra: Extra = None


class Step(_Part):
    step_id: int
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: str | list[Content]
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: Extra = None


class Agent(_Part):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: Extra = None


class FinalMetrics(_Part):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: Extra = None


class Trajectory(_Part):
    schema_version: str = VERSION
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: Agent
    steps: list[Step] = Field(min_length=1)
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: Extra = None
    subagent_trajectories: list["Trajectory"] | None = None


def read(path: Path) -> Trajectory:
    """The trajectory of a file. Raises InvalidInput with file, field, value and fix."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidInput(str(path), f"has more than {_MOST_BYTES >> 20} MiB; split it")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(str(path), f"cannot be read as JSON: {error}; give trajectory.json of an agent") from None
    try:
        trajectory = Trajectory.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        problem = f"is {shown(first['input'])}: {first['msg']}; correct it by RFC 0001 of Harbor"
        raise InvalidInput(f"{path}: {field}", problem) from None
    _check(trajectory, str(path))
    return trajectory


def shown(value: Any) -> str:
    """Returns the value for an error message, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check(trajectory: Trajectory, place: str) -> None:
    """Raises InvalidInput for what the types cannot say."""
    if trajectory.schema_version not in _VERSIONS:
        known = f"{_VERSIONS[0]} to {_VERSIONS[-1]}"
        raise InvalidInput(f"{place}: schema_version", f"is {trajectory.schema_version!r}, must be {known}")
    for number, step in enumerate(trajectory.steps):
        where = f"{place}: steps.{number}"
        if step.step_id != number + 1:
            raise InvalidInput(f"{where}.step_id", f"is {step.step_id}, must be {number + 1}: steps count from 1")
        if step.source != "agent":
            for name in ("tool_calls", "metrics", "reasoning_content", "model_name", "reasoning_effort"):
                if getattr(step, name) is not None:
                    raise InvalidInput(f"{where}.{name}", f"is given, and source is {step.source!r}; remove one")
        calls = {call.tool_call_id for call in step.tool_calls or []}
        for index, result in enumerate(step.observation.results if step.observation else []):
            if result.source_call_id is not None and result.source_call_id not in calls:
                problem = (
                    f"is {result.source_call_id!r}, must be one of the step's calls ({', '.join(calls) or 'none'})"
                )
                raise InvalidInput(f"{where}.observation.results.{index}.source_call_id", problem)
    for number, inner in enumerate(trajectory.subagent_trajectories or []):
        _check(inner, f"{place}: subagent_trajectories.{number}")


def text_of(content: str | list[Content] | None, place: str) -> str:
    """Returns the text of a message. Raises InvalidInput for images and sound."""
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidInput(f"{place}.{number}", f"is of type {part.type!r}; only text is read, leave this file out")
    return "\n".join(part.text or "" for part in content)
