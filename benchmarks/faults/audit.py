"""Reconstruct the data of each optimizer step, and the weights that sampled it, from records of probe and grader.

A sequence is a row's prompt and the tokens after it. A step's sequences are those whose embedding was computed with
gradients since the process's former step. The lineage is the steps that the last weights are made of: the last step,
the step whose weights it began with, and so on. A step that a restart undid is in no lineage.

Of episodes of several turns, a sequence is compared with the tool's records by its visible text, since a tool knows no
tokens: replies and answers, which the tool recorded at each step.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Response = tuple[int, tuple[int, ...] | str]  # row, tokens; of several turns the text up to the end of one of them


@dataclass(frozen=True)
class Work:
    """The workload: each row is trained once, in `rows / tasks` steps of `tasks` groups of `group` responses."""

    prompts: Sequence[tuple[int, ...]]  # of each row, with the chat template
    group: int
    tasks: int
    special: frozenset[int]  # end and padding
    ahead: int = 0  # steps that sampling may be ahead of training, as the system is configured
    turns: int = 1  # replies of an episode
    decode: Callable[[Sequence[int]], str] | None = None  # for episodes of several turns

    @property
    def steps(self) -> int:
        return len(self.prompts) // self.tasks


@dataclass
class Step:
    time: float
    before: str
    after: str
    bits: int  # of the weights before
    finite: bool  # the weights after
    sequences: Counter[Response] = field(default_factory=Counter)


@dataclass(frozen=True)
class Figures:
    """Counts of lost, repeated and invented data; 0 for a run that trains each row once, on graded responses."""

    steps: int  # of the lineage
    steps_undone: int
    rows_skipped: int
    rows_twice: int
    groups_partly: int
    ungraded: int  # trained responses that no grader ever gave a reward
    lost: int  # graded responses that are in no step of the lineage
    graded: int
    unexplained: int  # steps whose weights come neither from the beginning nor from another step
    other_weights: int  # trained responses that older weights sampled than the configuration allows, or unknown ones
    other_batch: int  # undone steps that were done again with other data
    not_finite: int  # steps after which a weight is not finite
    weights: str  # checksum of the last weights
    turns_lost: int = 0  # sampled replies of episodes that are in no step of the lineage
    turns_sampled: int = 0
    acted: int = 0  # further steps of the tool than those of trained episodes

    @property
    def faults(self) -> Mapping[str, int]:
        names = (
            "rows_skipped",
            "rows_twice",
            "groups_partly",
            "ungraded",
            "unexplained",
            "other_weights",
            "other_batch",
            "not_finite",
        )
        return {name: value for name in names if (value := getattr(self, name))}


def audit(records: Path, work: Work) -> Figures:
    """Reads the records of a run. Raises ValueError for tokens that are none of the rows' prompts."""
    steps = read_steps(records, work)
    lineage = lineage_of(steps)
    sampled, turns = _sampled(records, work), _turns(records)
    times_sampled = Counter({one: len(weights) for one, weights in sampled.items()})
    graded = Counter(_graded(line, work) for line in read(records, "grade") if line["value"] is not None)
    executed = Counter(_graded(line, work) for line in read(records, "tool"))
    trained: Counter[Response] = Counter()
    times: Counter[int] = Counter()
    partly = 0
    for step in lineage:
        groups = Counter(row for row, _ in step.sequences.elements())
        partly += sum(count < work.group for count in groups.values())
        times.update(groups.keys())
        trained.update(step.sequences)
    turns_trained = Counter(turn for one in trained.elements() for turn in turns.get(one, [one]))
    return Figures(
        steps=len(lineage),
        steps_undone=len(steps) - len(lineage),
        rows_skipped=sum(row not in times for row in range(len(work.prompts))),
        rows_twice=sum(count - 1 for count in times.values()),
        groups_partly=partly,
        ungraded=sum((trained - graded).values()),
        lost=sum(((graded & times_sampled) - trained).values()),
        graded=sum(graded.values()),
        unexplained=int(bool(lineage) and lineage[0].before != steps[0].before),
        other_weights=_other_weights(lineage, sampled, turns, work.ahead),
        other_batch=_other_batch(steps, lineage),
        not_finite=sum(not step.finite for step in lineage),
        weights=lineage[-1].after if lineage else "",
        turns_lost=sum((times_sampled - turns_trained).values()) if work.turns > 1 else 0,
        turns_sampled=sum(times_sampled.values()) if work.turns > 1 else 0,
        acted=sum((executed - turns_trained).values()),
    )


def _graded(line: Mapping[str, Any], work: Work) -> Response:
    """Returns what the grader or the tool recorded; the grader knows tokens, the tool all that was said."""
    return (line["row"], _visible("".join(line["said"])) if work.turns > 1 else _stripped(line["ids"], work))


def _turns(records: Path) -> dict[Response, list[Response]]:
    """Returns each finished episode's text up to the end of each turn."""
    found = {}
    for line in read(records, "grade"):
        if said := line.get("said"):
            ends = range(1, len(said) + 1, 2)
            turns: list[Response] = [(line["row"], _visible("".join(said[:end]))) for end in ends]
            found[turns[-1]] = turns
    return found


def _visible(text: str) -> str:
    """Returns what any decoder makes of tokens, also of bytes that are no text: the visible ASCII characters."""
    return "".join(character for character in text if "!" <= character <= "~")


def _sampled(records: Path, work: Work) -> dict[Response, list[int]]:
    """Returns the weights that sampled each response, as often as it was sampled."""
    found: dict[Response, list[int]] = {}
    for line in read(records, "sample"):
        for response in responses_in(line["ids"], work) if _starts(line["ids"], work) else ():  # not a canary's prompt
            found.setdefault(response, []).append(line["bits"])
    return found


def _other_weights(
    lineage: Sequence[Step],
    sampled: Mapping[Response, Sequence[int]],
    turns: Mapping[Response, Sequence[Response]],
    ahead: int,
) -> int:
    found = 0
    for place, step in enumerate(lineage):
        allowed = {before.bits for before in lineage[max(0, place - ahead) : place + 1]}
        for one in step.sequences.elements():
            found += any(allowed.isdisjoint(sampled.get(turn, ())) for turn in turns.get(one, [one]))
    return found


def _other_batch(steps: Sequence[Step], lineage: Sequence[Step]) -> int:
    """Compares undone steps with the step of the lineage that has the same place."""
    if not lineage or lineage[0].before != steps[0].before:  # a new lineage, with other places
        return 0
    found = 0
    for step, place in places(steps):
        done = lineage[place - 1] if place <= len(lineage) else step
        found += done is not step and done.sequences != step.sequences
    return found


def places(steps: Sequence[Step]) -> list[tuple[Step, int]]:
    """Returns steps with their place, from 1: one more than that of the step that made the weights before it."""
    after = {steps[0].before: 0} if steps else {}
    found = []
    for step in steps:
        if (place := after.get(step.before)) is not None:
            after[step.after] = place + 1
            found.append((step, place + 1))
    return found


def read(records: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the lines of all processes, oldest first. A last line that a kill cut off is left out."""
    lines = []
    for path in records.glob(f"{kind}-*.jsonl"):
        lines += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(lines, key=lambda line: line["time"])


def read_steps(records: Path, work: Work) -> list[Step]:
    """Returns the optimizer steps that learned from sequences, oldest first."""
    steps, pending = [], dict[int, list[Response]]()
    for line in read(records, "train"):
        seen = pending.setdefault(line["pid"], [])
        if line["kind"] == "forward":
            seen += [response for ids in line["ids"] for response in responses_in(ids, work)]
        elif line["kind"] == "left out":
            seen.clear()
        elif seen:
            known = {name: line[name] for name in ("time", "before", "after", "bits", "finite")}
            steps.append(Step(**known, sequences=Counter(seen)))
            pending[line["pid"]] = []
    return steps


def lineage_of(steps: Sequence[Step]) -> list[Step]:
    """Returns the steps that made the last weights, oldest first."""
    lineage = list(steps[-1:])
    for step in reversed(steps[:-1]):
        if step.after == lineage[-1].before:
            lineage.append(step)
    return lineage[::-1]


def responses_in(ids: Sequence[int], work: Work) -> Iterable[Response]:
    """Yields the responses in a row of a batch, which may be padded, or pack several sequences."""
    starts = _starts(ids, work)
    ends = [position for position, _ in starts[1:]] + [len(ids)]
    for (position, row), end in zip(starts, ends, strict=True):
        response = ids[position + len(work.prompts[row]) : end]
        yield row, _visible(work.decode(response)) if work.turns > 1 and work.decode else _stripped(response, work)


def _starts(ids: Sequence[int], work: Work) -> list[tuple[int, int]]:
    return sorted((position, row) for row, prompt in enumerate(work.prompts) for position in _positions(ids, prompt))


def _positions(ids: Sequence[int], prompt: tuple[int, ...]) -> Iterable[int]:
    for position in range(len(ids) - len(prompt) + 1):
        if ids[position] == prompt[0] and tuple(ids[position : position + len(prompt)]) == prompt:
            yield position


def _stripped(ids: Sequence[int], work: Work) -> tuple[int, ...]:
    """Returns the tokens without the end and the padding after them."""
    end = len(ids)
    while end and ids[end - 1] in work.special:
        end -= 1
    return tuple(ids[:end])
