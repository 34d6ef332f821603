"""Parses the action in a reply, in time linear in the reply's length."""

from dataclasses import dataclass

from trinity.config.workflows import ActionForm

_MAX_ACTION = 2_000


@dataclass(frozen=True)
class Parsed:
    """`action`: sent to the environment. `problem`: why there is none, as text that the policy reads."""

    action: str = ""
    problem: str = ""


def parse_action(reply: str, form: ActionForm, thinking: bool) -> Parsed:
    """The action of a reply. thinking: there must be exactly one <think>...</think> and, behind it, one action.

    Without it the last of any number of actions counts.
    """
    if form is ActionForm.REPLY:
        return Parsed(reply)
    if thinking:
        problem = _thinking_problem(reply, form)
        if problem:
            return Parsed(problem=problem)
    found = _last_fenced(reply) if form is ActionForm.FENCE else _last_between(reply, f"<{form}>", f"</{form}>")
    if found is None or not found.strip():
        return Parsed(problem=f"there is no {_example(form)} in your reply")
    if len(found) > _MAX_ACTION:
        return Parsed(problem=f"the action has {len(found)} characters, at most {_MAX_ACTION} are allowed")
    return Parsed(found.strip())


def _thinking_problem(reply: str, form: ActionForm) -> str:
    tags = ["think"] if form is ActionForm.FENCE else ["think", str(form)]
    for tag in tags:
        opened, closed = reply.count(f"<{tag}>"), reply.count(f"</{tag}>")
        if (opened, closed) != (1, 1) or reply.find(f"<{tag}>") > reply.find(f"</{tag}>"):
            return f"there must be exactly one <{tag}>...</{tag}> in your reply"
    if len(tags) == 2 and reply.find("</think>") > reply.find(f"<{form}>"):
        return f"<{form}> must stand behind </think>"
    return ""


def _last_between(reply: str, opening: str, closing: str) -> str | None:
    close = reply.rfind(closing)
    begin = reply.rfind(opening, 0, max(close, 0))
    return reply[begin + len(opening) : close] if begin != -1 else None


def _last_fenced(reply: str) -> str | None:
    parts = reply.rsplit("```", 2)
    return parts[1] if len(parts) == 3 else None


def _example(form: ActionForm) -> str:
    return "block between triple backticks" if form is ActionForm.FENCE else f"<{form}>...</{form}>"
