"""`trinity atif`: archived episodes as trajectories in ATIF, Harbor's form, and such trajectories as rows to train on.

Each experience of an archive is a file. Its runs of trained tokens are the agent's steps, with their token ids and
log-probabilities; the tokens between them are what the environment answered.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count, groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tokenizers import Tokenizer

from trinity.commands import command, group
from trinity.data.experience import Experience, Group
from trinity.plugins import satellites
from trinity.reading.errors import RunError
from trinity.runtime.errors import InvalidInput
from trinity.runtime.files import write_atomic
from trinity.runtime.version import installed_version
from trinity.ui import atif_form as form

app = group("Trajectories in ATIF, Harbor's form: archives as files, and files as rows.")

Row = dict[str, Any]
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_UNSAFE = re.compile(r"[^\w.-]+")
_TASK_BYTES = 180  # of the 255 of a file's name; the numbers tell files apart


@command(app, "export")
def export(
    archive: Annotated[str, typer.Argument(help="Archive of experiences: .jsonl, .parquet, .db or a URL")],
    model: Annotated[Path, typer.Option("--model", help="Folder of the model, with tokenizer.json")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must be empty or not there")],
    name: Annotated[str, typer.Option("--name", help="Table of an SQL archive")] = "experience_buffer",
) -> str:
    """Write each experience of an archive as a trajectory."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunError(f"--output {output}: is no empty folder; name another one", 2)
    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing more exact
        raise RunError(f"--model {model}: has no tokenizer.json that can be read ({error})", 2) from None
    groups = _archives().read_experiences(archive, name)
    output.mkdir(parents=True, exist_ok=True)
    written = 0
    for number, one in enumerate(groups):
        for index, experience in enumerate(one.experiences):
            made = trajectory(one, number, experience, index, tokenizer, model.resolve().name)
            task = _UNSAFE.sub("_", one.task.task_id).encode()[:_TASK_BYTES].decode(errors="ignore")
            file = output / f"{task}-{number}-{experience.rollout}-{index}.json"
            file.write_bytes(_strict(made.model_dump(exclude_none=True)))
            written += 1
    return f"{output}: {written} trajectories of {len(groups)} groups"


def trajectory(
    whole: Group, number: int, experience: Experience, index: int, tokenizer: Tokenizer, model: str
) -> form.Trajectory:
    """The experience `index` of a group. `number`: the group's place in the archive."""

    def decoded(ids: np.ndarray) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    prompt = experience.token_ids[: experience.prompt_length]
    steps = [form.Step(step_id=1, source="user", message=experience.prompt_text or decoded(prompt))]
    for first, end, sampled in _runs(experience.action_mask):
        ids = experience.token_ids[experience.prompt_length + first : experience.prompt_length + end]
        if sampled:
            before = experience.token_ids[: experience.prompt_length + first]
            steps.append(_agent(len(steps) + 1, before, ids, experience.logprobs[first:end], decoded(ids)))
        elif steps[-1].source == "agent":
            calls = steps[-1].tool_calls or []
            caller = calls[0].tool_call_id if len(calls) == 1 else None
            result = form.Result(source_call_id=caller, content=decoded(ids))
            steps[-1].observation = form.Observation(results=[result])
        else:
            steps.append(form.Step(step_id=len(steps) + 1, source="user", message=decoded(ids)))
    told = [step.metrics for step in steps if step.metrics is not None]
    session = f"{whole.task.task_id}-{number}-{experience.rollout}"
    return form.Trajectory(
        session_id=session,
        trajectory_id=f"{session}-{index}",
        agent=form.Agent(name="trinity", version=installed_version("trinity-ui"), model_name=model),
        steps=steps,
        final_metrics=form.FinalMetrics(
            total_prompt_tokens=sum(one.prompt_tokens or 0 for one in told),
            total_completion_tokens=sum(one.completion_tokens or 0 for one in told),
            total_steps=len(steps),
            extra={"reward": experience.reward, **experience.metrics},
        ),
        extra={
            "reward": experience.reward,
            "task_id": whole.task.task_id,
            "group": number,
            "rollout": experience.rollout,
            "step": experience.step,
            "versions": [span.version for span in experience.version_spans],
        },
    )


def _strict(value: Any) -> bytes:
    """Returns JSON in UTF-8. Raises ValueError for NaN, infinities and halves of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _runs(mask: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """Yields (first token, one past the last, trained) of each run of equal values."""
    first = 0
    for value, run in groupby(mask.tolist()):
        end = first + len(list(run))
        yield first, end, bool(value)
        first = end


def _agent(number: int, before: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, text: str) -> form.Step:
    calls: list[form.ToolCall] = []
    for match in _CALL.finditer(text):
        try:
            found = json.loads(match[1])
            _strict(found)
            given = found.get("arguments") or {}
            call = form.ToolCall(
                tool_call_id=f"call_{number}_{len(calls)}", function_name=str(found["name"]), arguments=given
            )
        except (ValueError, KeyError, AttributeError, RecursionError):
            continue  # only the text has it
        calls.append(call)
    return form.Step(
        step_id=number,
        source="agent",
        message=text,
        tool_calls=calls or None,
        llm_call_count=1,
        metrics=form.Metrics(
            prompt_tokens=len(before),
            completion_tokens=len(ids),
            prompt_token_ids=before.tolist(),
            completion_token_ids=ids.tolist(),
            logprobs=[float(value) for value in logprobs],
        ),
    )


@command(app, "import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="Trajectories, or folders that are searched for trajectory.json")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The rows, a .jsonl; it must not be there")],
    rows: Annotated[
        str, typer.Option("--as", help="messages: conversations for SFT; experience: tokens for offline training")
    ] = "messages",
) -> str:
    """Write trajectories as rows for SFT or offline training."""
    made: dict[str, Callable[[form.Trajectory, Path], Iterator[Row]]] = {
        "messages": _conversations,
        "experience": _Experiences().rows,
    }
    if rows not in made:
        raise RunError(f"--as {rows}: must be messages or experience", 2)
    if output.exists() or output.suffix != ".jsonl":
        raise RunError(f"--output {output}: must be a new file whose name ends in .jsonl", 2)
    paths = list(_found(files))
    if not paths:
        raise RunError(f"{files[0]}: holds no trajectory.json; name the files", 2)
    try:
        lines = [_line(row, path) for path in paths for row in made[rows](form.read(path), path)]
    except InvalidInput as error:
        raise RunError(f"{error}; nothing was written", 2) from None
    write_atomic(output, b"".join(lines))
    return f"{output}: {len(lines)} rows of {len(paths)} trajectories"


def _line(row: Row, path: Path) -> bytes:
    try:
        return _strict(row) + b"\n"
    except ValueError:
        field, value = next(_wrong(row))
        what = f"is {form.shown(value)}, must be a finite number, or text without half of a surrogate pair"
        raise InvalidInput(f"{path}: {field}", what) from None


def _wrong(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the names and values that `_strict` refuses."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _wrong(name, field)
            yield from _wrong(inner, f"{field}.{name}".removeprefix("."))
        return
    try:
        _strict(value)
    except ValueError:
        yield field, value


def _found(given: list[Path]) -> Iterator[Path]:
    for path in given:
        if not path.is_dir():
            yield path
        elif inside := sorted(path.rglob("trajectory.json")):
            yield from inside
        else:
            yield from sorted(path.glob("*.json"))


def _conversations(found: form.Trajectory, path: Path) -> Iterator[Row]:
    """Yields one conversation for each agent: {messages, tools, reward, task_id}."""
    for place, one in _agents(found, str(path)):
        messages: list[Row] = []
        for number, step in enumerate(one.steps):
            where = f"{place}: steps.{number}"
            if step.source == "agent" and (step.is_copied_context or step.llm_call_count == 0):
                what = "is_copied_context" if step.is_copied_context else "llm_call_count"
                raise InvalidInput(
                    f"{where}.{what}",
                    f"is {getattr(step, what)}: no model said this, and SFT would train it; remove the step, or leave "
                    "this file out",
                )
            messages += _messages(step, where)
        row: Row = {"messages": messages, "task_id": _task_id(one, path)}
        if one.agent.tool_definitions:
            row["tools"] = one.agent.tool_definitions
        reward = _reward(one, path)
        yield row if reward is None else {**row, "reward": reward}


def _messages(step: form.Step, where: str) -> Iterator[Row]:
    role = "assistant" if step.source == "agent" else step.source
    message: Row = {"role": role, "content": form.text_of(step.message, f"{where}.message")}
    if step.reasoning_content is not None:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["content"] = _CALL.sub("", message["content"]).rstrip()
        message["tool_calls"] = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.function_name, "arguments": call.arguments},
            }
            for call in step.tool_calls
        ]
    yield message
    for index, result in enumerate(step.observation.results if step.observation else []):
        text = form.text_of(result.content, f"{where}.observation.results.{index}.content")
        if result.source_call_id is not None:
            yield {"role": "tool", "tool_call_id": result.source_call_id, "content": text}
        else:
            yield {"role": "user", "content": text}


def _archives() -> Any:
    if (found := satellites.find("archive")) is None:
        raise RunError(f"archives of experience need {satellites.missing('archive')}", 2)
    return found


class _Experiences:
    """Rows of an archive. Trajectories without a number in `extra.rollout` are numbered within their task and group."""

    def __init__(self) -> None:
        self._rollouts: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(count)
        self._seen: set[tuple[str, int, int, int]] = set()

    def rows(self, found: form.Trajectory, path: Path) -> Iterator[Row]:
        """Yields rows of an archive. Steps whose prompt continues the tokens before them are one row."""
        for place, one in _agents(found, str(path)):
            reward = _reward(one, path)
            if reward is None:
                raise InvalidInput(
                    f"{place}: extra.reward",
                    "is missing; add it, or keep the trial's verifier/reward.txt beside the agent's folder",
                )
            rows: list[Row] = []
            for number, step in enumerate(one.steps):
                if step.source == "agent" and step.llm_call_count != 0:
                    _add(rows, step, f"{place}: steps.{number}")
            if not rows:
                raise InvalidInput(f"{place}: steps", "has no step of an agent; leave this file out")
            task, group, rollout = _task_id(one, path), _whole(one, "group") or 0, _whole(one, "rollout")
            if rollout is None:
                rollout = next(self._rollouts[task, group])
            for index, row in enumerate(rows):
                at = (_whole(one, "step") or 0) + index
                row |= {"run": "atif", "task_id": task, "log_sequence": group, "rollout": rollout, "step": at}
                row["reward"] = reward
                _archives().check_row(row, place)
                if (task, group, rollout, at) in self._seen:
                    problem = f"is {rollout}, and step {at} of that rollout is there already; give each its own number"
                    raise InvalidInput(f"{place}: extra.rollout", problem)
                self._seen.add((task, group, rollout, at))
                yield row


def _add(rows: list[Row], step: form.Step, where: str) -> None:
    """Adds a step's tokens to the last row if they continue it, else a new row."""
    metrics = step.metrics or form.Metrics()
    before, said = metrics.prompt_token_ids, metrics.completion_token_ids
    for name, value in (("prompt_token_ids", before), ("completion_token_ids", said)):
        if not value:
            raise InvalidInput(
                f"{where}.metrics.{name}", f"is {value}; experience needs the tokens of each step. Use --as messages"
            )
    if metrics.logprobs is not None and len(metrics.logprobs) != len(said or []):
        problem = (
            f"has {len(metrics.logprobs)} values, must have one for each of {len(said or [])} completion_token_ids"
        )
        raise InvalidInput(f"{where}.metrics.logprobs", problem)
    assert before is not None
    assert said is not None
    trained = [not step.is_copied_context] * len(said)
    known = rows[-1]["token_ids"] if rows else []
    if rows and before[: len(known)] == known:
        row, between = rows[-1], before[len(known) :]
        if ("logprobs" in row) != (metrics.logprobs is not None):
            raise InvalidInput(f"{where}.metrics.logprobs", "must be in all steps of a conversation, or in none")
        row["token_ids"] = [*known, *between, *said]
        row["action_mask"] += [False] * len(between) + trained
        if metrics.logprobs is not None:
            row["logprobs"] += [0.0] * len(between) + metrics.logprobs
        return
    row = {"token_ids": [*before, *said], "prompt_length": len(before), "action_mask": trained}
    rows.append(row | ({"logprobs": list(metrics.logprobs)} if metrics.logprobs is not None else {}))


def _agents(found: form.Trajectory, place: str) -> Iterator[tuple[str, form.Trajectory]]:
    """Yields the trajectory and those of its sub-agents."""
    yield place, found
    for number, inner in enumerate(found.subagent_trajectories or []):
        yield from _agents(inner, f"{place}: subagent_trajectories.{number}")


def _task_id(found: form.Trajectory, path: Path) -> str:
    own = (found.extra or {}).get("task_id") or _json(path.parent.parent / "result.json").get("task_name")
    return str(own or found.session_id or found.trajectory_id or path.stem)


def _whole(found: form.Trajectory, name: str) -> int | None:
    """Returns the whole number of this name in `extra`. Other programs keep there what they like."""
    value = (found.extra or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _reward(found: form.Trajectory, path: Path) -> float | None:
    """Returns extra.reward, or what the verifier of a trial of Harbor wrote: <trial>/agent/trajectory.json."""
    verifier = path.parent.parent / "verifier"
    of_final = (found.final_metrics.extra if found.final_metrics else None) or {}
    text = verifier / "reward.txt"
    for given in (
        (found.extra or {}).get("reward"),
        of_final.get("reward"),
        _json(verifier / "reward.json").get("reward"),
        text.read_text(encoding="utf-8", errors="replace").strip() if text.is_file() else None,
    ):
        if given is None:
            continue
        try:
            number = float(given)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if isinstance(given, bool) or "_" in str(given) or not np.isfinite(number):  # float() takes 1_0 for 10
            raise InvalidInput(f"{path}: reward", f"is {form.shown(given)}, must be a finite number")
        return number
    return None


def _json(path: Path) -> Row:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
