"""Tables and texts of the outcome of a task."""

from collections.abc import Sequence
from typing import Any

from trinity.data.experience import Task
from trinity.reading.render import pairs, table, visible

Found = dict[str, Any]


def render(task: Task, found: Found) -> str:
    """`found` is the answer of the engine process: see `engine`."""
    made: list[Found] = found["experiences"]
    head = {
        "task": task.task_id,
        "workflow": task.workflow,
        "reward function": task.reward_function,
        "seconds": f"{found['seconds']:.2f}",
    }
    if found["failure"] is not None:
        failure = found["failure"]
        return pairs({**head, "failed": failure["cause"], "error": failure["error"]})
    rewards = [one["reward"] for one in made]
    head |= {"experiences": str(len(made)), "mean reward": f"{sum(rewards) / len(rewards):.3f}"}
    parts = [pairs(head), table(made, _COLUMNS), _metrics(made), *_texts(made)]
    return "\n\n".join(part for part in parts if part)


def _metrics(made: Sequence[Found]) -> str:
    """Returns a row for each metric, with the parts of the reward, and a column for each experience."""
    names = sorted({name for one in made for name in one["metrics"]})
    columns: dict[str, Any] = {"metric": lambda name: name}
    for number, one in enumerate(made):
        columns[f"#{number}"] = lambda name, one=one: _decimal(one["metrics"].get(name))
    return table(names, columns) if names else ""


def _texts(made: Sequence[Found]) -> list[str]:
    """Returns prompt and response of each experience, without repeated prompts."""
    texts, before = [], None
    for number, one in enumerate(made):
        for key in ("prompt", "response"):
            if key == "prompt" and one[key] == before:
                continue
            head = f"--- #{number} {key}: {one[f'{key}_tokens']} tokens ---"
            texts.append(f"{head}\n{visible(one[key], layout=True)}")
        before = one["prompt"]
    return texts


def spans(mask: Sequence[int]) -> str:
    """Returns the trained response tokens: "all", "none", or ranges as "0-12 20-31"."""
    if all(mask):
        return "all" if mask else "none"
    edges = [place for place in range(len(mask)) if mask[place] != (mask[place - 1] if place else 0)]
    edges += [len(mask)] * (len(edges) % 2)
    return " ".join(f"{begin}-{end}" for begin, end in zip(edges[::2], edges[1::2], strict=True)) or "none"


def _logprobs(one: Found) -> str:
    """Returns mean and least log-probability of the trained tokens."""
    values = [value for value, trained in zip(one["logprobs"], one["mask"], strict=True) if trained]
    return f"{sum(values) / len(values):.3f} / {min(values):.3f}" if values else "-"


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


_COLUMNS: dict[str, Any] = {
    "rollout": lambda one: one["rollout"],
    "step": lambda one: one["step"],
    "reward": lambda one: _decimal(one["reward"]),
    "tokens": lambda one: f"{one['prompt_tokens']}+{one['response_tokens']}",
    "trained": lambda one: spans(one["mask"]),
    "log-probability (mean / least)": _logprobs,
    "truncated": lambda one: one["truncation"].replace("none", ""),
}
