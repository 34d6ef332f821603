"""Tries out the environment and the reward function of a taskset, in this process or by their provider."""

import asyncio
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity import plugins
from trinity.cli.supervise.checks.task_environments import episodes_of, playable_here
from trinity.cli.supervise.checks.task_rows import names_for
from trinity.config import Plan, Problem
from trinity.config.errors import did_you_mean
from trinity.config.names import reward_named
from trinity.config.schema.buffer import TasksetConfig
from trinity.config.workflows import EPISODE_WORKFLOWS, R3L_WORKFLOWS, GameRules, scored_by
from trinity.data.datasets import Row
from trinity.data.prompts import references_for
from trinity.data.vision import why_no_images
from trinity.deep_check.provider import try_provider
from trinity.plugins.environments import built_in_scorers
from trinity.reading.job import read_records
from trinity.runtime.errors import UNEXPECTED, Conflict, InvalidInput, NotFound, Unavailable
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.sdk.environment import AsyncEnvironment, Environment
from trinity.sdk.scoring import GroupScorer, ScoreItem, results

_MOST_SECONDS = 60.0
_MOST_SCORED = 8  # rows of a taskset
_IN_FULL_FORM = "<think>\n\n</think>\n<answer>\n\\boxed{%s}\n</answer>"
_OF_ARGUMENTS = (InvalidInput, Conflict, Unavailable)


def check_environments(
    plan: Plan, tasksets: Sequence[tuple[str, TasksetConfig, Sequence[Row]]], job: Path
) -> Iterator[Problem | str]:
    """Begins an episode of every taskset's first row with its arguments, and scores a reply to it.

    Environments and reward functions then name refused arguments, missing extras and servers that do not answer.
    Built-in ones and ones of plugins and installed packages run here, providers with an address run there, and
    providers that attach are tried only while the run in the folder `job` is live. Yields problems, and sentences on
    conditions that may change until a run begins.
    """
    for key, taskset, rows in tasksets:
        workflow, reward = names_for(plan, key, taskset)
        for name, place, args in episodes_of(workflow, taskset.workflow_args):
            yield from _environment(plan, key, name, place, args, dict(rows[0]), job)
            yield from _other_rows(plan, key, name, f"workflow_args.{place}", args, rows)
            yield from _players(key, workflow, name, taskset.workflow_args)
        column = taskset.format.reward_fn_key
        firsts: dict[str, list[int]] = {}  # of the rows that a reward function scores
        for number, row in enumerate(rows):
            numbers = firsts.setdefault(scored_by(workflow, reward_named(str(row.get(column) or reward))), [])
            numbers += [number] if len(numbers) < _MOST_SCORED else []
        for function, numbers in firsts.items():
            if function:
                yield from _reward(plan, key, taskset, function, {n: dict(rows[n]) for n in numbers}, job)


def _environment(
    plan: Plan, key: str, name: str, place: str, args: dict[str, Any], row: Row, job: Path
) -> Iterator[Problem | str]:
    there = f"{key}.workflow_args.environment"
    here = playable_here()
    provided = {one.name for one in plan.config.explorer.environments}
    if name in provided:
        yield from _provided(plan, key, name, f"workflow_args.{place}", args, row, job)
        return
    if name not in here:
        what = f"{name!r} is neither built in nor installed{_near(name, [*here, *provided])}"
        yield f"{there}: {what}; a provider may still attach it (explorer.environments names it then)"
        return
    if here[name].description.images:
        yield from _showing(plan, key, name)
    seconds = min(_MOST_SECONDS, here[name].description.reset_timeout_seconds or _MOST_SECONDS)
    try:
        error = _within(seconds, lambda: _begin(here[name], row, args))
    except TimeoutError:
        yield f"{there}: no episode of {name!r} began within {seconds:g} s"
        return
    yield from _problems(key, f"workflow_args.{place}", there, name, f"no episode of {name!r} could begin", error)


def _other_rows(
    plan: Plan, key: str, name: str, place: str, args: dict[str, Any], rows: Sequence[Row]
) -> Iterator[Problem | str]:
    """Yields the first row that an environment of this process refuses, where it can tell without an episode."""
    read = getattr(playable_here().get(name), "read_row", Environment.read_row)
    if read is Environment.read_row or name in {one.name for one in plan.config.explorer.environments}:
        return
    for number, row in enumerate(rows[1:], 1):
        try:
            read(dict(row), args)
        except Exception as error:  # of another's code
            yield from _problems(key, place, key, name, f"{name!r} cannot read row {number}", error, number)
            return


def _players(key: str, workflow: str, name: str, given: dict[str, Any]) -> Iterator[Problem]:
    """Yields a problem if the players of an environment do not fit the workflow or its seats."""
    if (kind := playable_here().get(name)) is None:
        return
    players, rules = kind.description.players, EPISODE_WORKFLOWS.get(workflow)
    if isinstance(rules, GameRules):
        if found := rules.with_args(given).seats_problem(players):
            argument, problem = found
            yield Problem(f"{key}.workflow_args.{argument}", problem)
    elif players:
        problem = f"is {name!r}, a game of {' and '.join(players)}; {workflow} plays one player, use players_workflow"
        yield Problem(f"{key}.workflow_args.environment", problem)


def _showing(plan: Plan, key: str, name: str) -> Iterator[Problem]:
    """Yields a problem if the images of an environment cannot be read."""
    path, place = plan.config.model.model_path, f"{key}.workflow_args.environment"
    taskset = next(
        one for where, one in plan.config.buffer.explorer_input.by_key() if key == f"buffer.explorer_input.{where}"
    )
    workflow, _ = names_for(plan, key, taskset)
    if workflow == "tool_call_workflow" or (workflow in R3L_WORKFLOWS and ".eval_tasksets" not in key):
        yield Problem(place, f"is {name!r}, which shows images; {workflow} reads only text")
    if (reason := why_no_images(path, plan.config.model.images)) is not None:
        yield Problem(place, f"is {name!r}, which shows images, and {reason}")


def _begin(kind: Any, row: Row, args: dict[str, Any]) -> None:
    """Begins an episode up to its first observation. Raises the errors of the environment."""

    async def begin() -> None:
        environment = kind()
        try:
            await environment.reset(row, args, seed=0)
        finally:
            await environment.close()

    if issubclass(kind, AsyncEnvironment):
        asyncio.run(begin())
        return
    environment = kind()
    try:
        environment.reset(row, args, seed=0)
    finally:
        environment.close()


def _reward(
    plan: Plan, key: str, taskset: TasksetConfig, function: str, rows: Mapping[int, Row], job: Path
) -> Iterator[Problem | str]:
    """Scores an empty reply to each of some rows, by their number, and two with its reference answer.

    An error that a reward function raises is a problem: every attempt at such a row would fail with it. A reference
    without a reward is said, but for `code_tests`, whose references are tests.
    """
    if function in {one.name for one in plan.config.explorer.environments}:
        yield from _provided(
            plan, key, function, "reward_fn_args", taskset.reward_fn_args, next(iter(rows.values())), job
        )
        return
    scorer: Any = built_in_scorers().get(function) or plugins.REWARD_FUNCTIONS.get(function)
    if scorer is None:
        return
    folder = Path(str(sys.modules[scorer.__module__].__file__)).parent
    if function in plugins.GROUP_REWARD_FUNCTIONS:
        scorer = GroupScorer(scorer)
    form, recorder = taskset.format, _Recorder(taskset.reward_fn_args)
    tried, unrewarded = [next(iter(rows))], dict[int, str]()

    def score() -> None:
        for number, row in rows.items():
            tried.append(number)
            given = row.get(form.response_key, "")
            texts = [str(one) for one in given] if isinstance(given, list) and given else [str(given)]
            truth = references_for(function, texts)[0]
            replies = [
                ScoreItem(
                    str(row.get(form.prompt_key, "")), reply, truth or "0", row, response_tokens=1, token_ids=(0,)
                )
                for reply in ("", truth, _IN_FULL_FORM.replace("%s", truth))
            ]
            empty, *right = (result.reward for result in results(scorer, replies, recorder))
            if truth and max(right) <= min(0, empty):
                unrewarded[number] = truth

    place = f"{key}.default_reward_fn_type"
    try:
        error = _within(_MOST_SECONDS, score)
    except TimeoutError:
        yield f"{place}: {function} scored no reply within {_MOST_SECONDS:g} s"
        return
    what = f"{function} could not score a reply to row {tried[-1]}"
    if error is not None and not isinstance(error, _OF_ARGUMENTS):
        line = plugins.failing_line(error, folder)
        yield Problem(place, f"{what}: {line}{': ' if line else ''}{type(error).__name__}: {error}")
        return
    yield from _problems(key, "reward_fn_args", place, function, what, error, tried[-1])
    if unrewarded and function != "code_tests":
        first, truth = next(iter(unrewarded.items()))
        those = f"{len(unrewarded)} of {len(rows)} rows tried, first row {first}"
        yield f"{place}: {function} gives no reward to a reply that is its reference answer ({those}: {truth!r:.80})"
    if error is None:
        for name in taskset.reward_fn_args:
            if name not in recorder.used:
                yield f"{key}.reward_fn_args.{name}: {function} does not read it{_near(name, recorder.used)}"


def _provided(
    plan: Plan, key: str, name: str, place: str, args: dict[str, Any], row: Row, job: Path
) -> Iterator[Problem | str]:
    """Tries out the providers that explorer.environments names."""
    for index, one in enumerate(plan.config.explorer.environments):
        if one.name != name:
            continue
        address, identity, there = one.address, None, f"explorer.environments.{index}"
        if one.address == "attached":
            if not (address := _live(job)):
                yield f"{there}: {name} attaches to a live run; {key}.{place} is tried out by a check while it is there"
                continue
            identity = Identity(Role.EXPLORER, job / "identity")
        error, shows = asyncio.run(try_provider(address, name, row, args, identity))
        if shows:
            yield from _showing(plan, key, name)
        if isinstance(error, NotFound) and one.address != "attached":
            yield Problem(f"{there}.name", f"is {name!r}, which the provider at {address} does not offer: {error}")
            continue
        if isinstance(error, Unavailable) and one.address != "attached":
            continue  # check_providers says so of every address
        where = one.address if one.address != "attached" else "its provider"
        if place == "reward_fn_args" and isinstance(error, Exception) and not isinstance(error, _OF_ARGUMENTS):
            yield Problem(f"{key}.default_reward_fn_type", f"{name} at {where} could not score a reply: {error}")
            continue
        yield from _problems(key, place, there, name, f"{name} was refused by {where}", error)


def _live(job: Path) -> str:
    """Returns the address of the environment service of a live run in this folder, else an empty string."""
    processes = [process for record in read_records(job).values() for process in record.processes]
    return next((process.address for process in processes if process.service == "environment"), "")


def _problems(
    key: str, args: str, place: str, reader: str, what: str, error: BaseException | None, row: int = 0
) -> Iterator[Problem | str]:
    if isinstance(error, InvalidInput):
        yield _wrong(key, args, reader, error, row)
    elif isinstance(error, Conflict):
        yield Problem(place, f"{reader!r} cannot be played here: {error}")
    elif error is not None:
        said = f"{what}: {type(error).__name__}: {error}"
        yield Problem(place, said) if isinstance(error, UNEXPECTED) else f"{place}: {said}"


def _within(seconds: float, work: Callable[[], None]) -> BaseException | None:
    """Returns the error that `work` raised, if any. Raises TimeoutError; its thread then ends with this process."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except (Exception, SystemExit) as error:  # an environment and a plugin may raise anything
            raised.append(error)

    thread = threading.Thread(target=run, name="check", daemon=True)
    thread.start()
    thread.join(seconds)
    if not raised:
        raise TimeoutError
    return raised[0]


def _wrong(key: str, args: str, reader: str, error: InvalidInput, row: int) -> Problem:
    """Assigns `args.x` to the YAML, and any other field to the row."""
    where, _, name = error.field.partition(".")
    if where == "args":
        return Problem(f"{key}.{args}.{name}", str(error).removeprefix(f"{error.field}: "))
    return Problem(key, f"row {row}, as {reader} reads it: {error}")


class _Recorder(dict[str, Any]):
    """Arguments that record which of them were read. Reading all at once counts for each."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.used.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.used.add(name)
        return super().get(name, *default) if default else super().__getitem__(name)  # the next reply is scored too

    def __iter__(self) -> Iterator[str]:
        self.used.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self.used.update(super().keys())
        return super().keys()

    def items(self) -> Any:
        self.used.update(super().keys())
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other


def _near(name: str, known: Collection[str]) -> str:
    return f"; {near}" if (near := did_you_mean(str(name), known, "")) else ""
