"""An executor that begins at a snapshot and repeats the commands after it has the state of one that never stopped."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trinity.runtime.errors import DataLoss
from trinity.tinker.commands.log import Command, Kind, Result, canonical
from trinity.tinker.commands.wire import Datum, Forward, write_forward
from trinity.tinker.executor.executor import Executor
from trinity.tinker.executor.model import SharedModel, finished
from trinity.tinker.executor.states import States
from trinity.tinker.saved_adapters import canary_of, folder_of
from trinity.weights.adapters import read_adapters

pytestmark = pytest.mark.core

_LORA = {"seed": 3, "train_attn": True, "train_mlp": True}
_ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.1, "grad_clip_norm": 1.0}


def _commands() -> list[Command]:
    """Two models' commands in turns: gradients, steps, states that are saved, written over, loaded and expire."""
    made: list[Command] = []
    numbers = {"a": -1, "b": -1}

    def add(model: str, kind: Kind, body: dict | bytes, at: float = 0.0) -> None:
        numbers[model] += 1
        whole = body if isinstance(body, bytes) else canonical(body)
        made.append(Command(kind, "t", model, numbers[model], whole, at, len(made) + 1))

    def train(model: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        inputs = {"target_tokens": rng.integers(0, 250, 7), "weights": rng.random(7).astype(np.float32)}
        data = (Datum(rng.integers(0, 250, 7), inputs),)
        for _ in range(2):
            add(model, Kind.FORWARD_BACKWARD, write_forward(Forward(model, 1, data, "cross_entropy", {}, True)))
        add(model, Kind.OPTIM_STEP, {"adam_params": _ADAM})

    def save(model: str, *, overwrite: bool = False, ttl: int | None = None) -> None:
        add(model, Kind.SAVE_WEIGHTS, {"path": "s", "ttl_seconds": ttl, "overwrite": overwrite})

    def load(model: str, source: str, at: float = 0.0) -> None:
        add(model, Kind.LOAD_WEIGHTS, {"path": f"tinker://{source}/weights/s", "optimizer": True}, at)

    add("a", Kind.CREATE_MODEL, {"lora_config": {"rank": 2, **_LORA}})
    add("b", Kind.CREATE_MODEL, {"lora_config": {"rank": 8, **_LORA}})
    train("a", 1)
    save("a")
    train("b", 2)
    train("a", 3)
    load("a", "a")
    save("a")  # there already
    train("a", 4)
    save("a", overwrite=True, ttl=3600)
    load("a", "a")
    load("b", "a")  # another rank
    load("a", "a", at=4000.0)  # its time is over
    train("b", 5)
    train("a", 6)
    return made


@pytest.fixture(scope="module")
def shared(quickstart_model: Path) -> str:
    return str(quickstart_model)


def _executor(path: str, folder: Path) -> Executor:
    made = Executor(SharedModel(path, torch.float32, torch.device("cpu"), 64), States(folder))
    made.restore()
    return made


def _results(executor: Executor, commands: list[Command]) -> list[Result | None]:
    return [executor.execute(command) for command in commands if command.position > executor.position]


def _snapshot(executor: Executor, newest: Command) -> None:
    executor.snapshot(newest.position, newest.time)


def test_what_follows_a_snapshot_is_the_same_bit_for_bit(shared: str, tmp_path: Path) -> None:
    commands = _commands()
    whole = _results(_executor(shared, tmp_path / "whole"), commands)
    failures = [json.loads(one.body)["error"] for one in whole if one is not None and one.kind == Result.FAILED]
    expected = ["is there already", "has adapters of rank 2", "its time is over"]
    assert len(failures) == len(expected)
    assert all(reason in text for reason, text in zip(expected, failures, strict=True)), failures
    folder = tmp_path / "killed"
    for snapshot, killed in ((5, 9), (12, 19), (12, len(commands) - 2)):
        executor = _executor(shared, folder)
        for command in commands[executor.position : killed]:
            result = executor.execute(command)
            assert result == whole[command.position - 1]
            if command.position == snapshot:
                _snapshot(executor, command)
    last = _executor(shared, folder)
    assert last.position == 12
    assert _results(last, commands) == whole[12:]


def test_tenants_go_on_where_each_of_them_was(shared: str, tmp_path: Path) -> None:
    """One of them is beyond the other in the log."""
    of_both = [one for one in _commands() if (one.model, one.kind) != ("b", Kind.LOAD_WEIGHTS)]
    commands = [replace(one, tenant=one.model) for one in of_both]
    whole = {one.request_id: one for one in _results(_executor(shared, tmp_path / "w"), commands) if one is not None}
    mine, other = ([one for one in commands if one.tenant == tenant] for tenant in "ab")
    executor = _executor(shared, tmp_path)
    found = [executor.execute(one) for one in (mine[0], *other)]
    executor.snapshot(mine[1].position - 1, mine[1].time)
    again = _executor(shared, tmp_path)
    assert (again.position, again.executed, again.commands) == (2, {"b": other[-1].position}, 1 + len(other))
    found += [again.execute(one) for one in mine[1:]]
    assert {one.request_id: one for one in found if one is not None} == whole


def test_a_pass_is_the_same_with_other_tenants_between_its_parts(shared: str, tmp_path: Path) -> None:
    def create(model: str, at: int) -> Command:
        lora = canonical({"lora_config": {"rank": 4, **_LORA}})
        return Command(Kind.CREATE_MODEL, model, model, 0, lora, 0.0, at)

    def forward(model: str, at: int, sequences: int) -> Command:
        tokens = np.arange(40)
        data = (Datum(tokens, {"target_tokens": tokens, "weights": np.ones(40, np.float32)}),) * sequences
        body = write_forward(Forward(model, 1, data, "cross_entropy", {}, True))
        return Command(Kind.FORWARD_BACKWARD, model, model, at, body, 0.0, at)

    def step(model: str, at: int) -> Command:
        return Command(Kind.OPTIM_STEP, model, model, at, canonical({"adam_params": _ADAM}), 0.0, at)

    long, after = forward("a", 2, 3), [step("a", 7), forward("a", 8, 1)]
    others = [create("b", 3), forward("b", 4, 1), step("b", 5), forward("b", 6, 1)]
    whole = _results(_executor(shared, tmp_path / "whole"), [create("a", 1), long, *others, *after])
    executor = _executor(shared, tmp_path)
    first = executor.execute(create("a", 1))
    work, between = executor.work([long]), list[Result | None]()
    next(work)
    between += [executor.execute(command) for command in others[:2]]
    next(work)
    between += [executor.execute(command) for command in others[2:]]
    assert [first, *finished(work), *between, *(executor.execute(command) for command in after)] == whole


def _save_sampler(seq_id: int, at: int, path: str | None, *, time: float = 0.0, ttl: int | None = None) -> Command:
    body = {"path": path, "sampling_session_seq_id": None if path else seq_id, "ttl_seconds": ttl}
    return Command(Kind.SAVE_SAMPLER, "t", "s:train:0", seq_id, canonical(body), time, at)


def test_adapters_to_sample_by_are_kept_as_long_as_they_are_named(shared: str, tmp_path: Path) -> None:
    """The newest 16 without a name, those with a name until their time is over, and none of an ended session."""
    executor = _executor(shared, tmp_path)
    lora = {"lora_config": {"rank": 2, **_LORA}}
    create = Command(Kind.CREATE_MODEL, "t", "s:train:0", 0, canonical(lora), 0.0, 1)
    unmade = replace(_save_sampler(1, 2, "x"), model="s:train:9")
    saves = [_save_sampler(n, n + 2, None) for n in range(1, 21)]
    named = [_save_sampler(21, 23, "kept"), _save_sampler(22, 24, "short", ttl=3600)]
    results = _results(executor, [create, unmade, *saves, *named])
    assert [one.kind for one in results[:2] if one is not None] == ["create_model", Result.FAILED]
    assert json.loads(results[2].body)["sampling_session_id"] == "s:sample:1"
    assert json.loads(results[-1].body)["path"] == "tinker://s:train:0/sampler_weights/short"
    for saving in executor.saving.values():
        saving.result(10)
    _snapshot(executor, named[-1])
    late = _save_sampler(23, 25, "late", time=4000.0)
    executor.execute(late)
    executor.saving[late.position].result(10)
    _snapshot(executor, late)

    def kept() -> list[int]:
        return sorted(int(path.name) for path in (tmp_path / "sampled").iterdir())

    assert kept() == [*range(7, 26)], "the older snapshot still names 24"
    path = "tinker://s:train:0/sampler_weights/late"
    delete = Command(Kind.DELETE, "t", path, 25, b"{}", 4000.5, 26)
    assert executor.execute(delete) is None
    for position, session in enumerate(("other", "s", "more", "others"), 27):
        end = Command(Kind.END, "t", session, 1, b"{}", 4001.0, position)
        executor.execute(end)
        if session != "s":
            _snapshot(executor, end)
        if session == "other":
            assert kept() == [*range(7, 24), 25], "the older snapshot still names 25"
    assert kept() == [23]
    canary = canary_of(folder_of(tmp_path / "sampled", 23))
    adapters = read_adapters(folder_of(tmp_path / "sampled", 23))
    assert (adapters.rank, adapters.alpha, len(canary.probes), canary.max_tolerance) == (2, 32.0, 2, 1e-2)
    assert all(len(probe.logprobs) == len(probe.token_ids) - 1 for probe in canary.probes)
    assert _executor(shared, tmp_path).position == 30


def test_a_damaged_snapshot_gives_way_to_the_one_before(shared: str, tmp_path: Path) -> None:
    commands = _commands()
    executor = _executor(shared, tmp_path)
    for position in (4, 8):
        for command in commands[executor.commands : position]:
            executor.execute(command)
        _snapshot(executor, commands[position - 1])
    newest, older = (sorted((tmp_path / "snapshots").iterdir(), reverse=True))[:2]
    for file in newest.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert _executor(shared, tmp_path).position == 4
    (older / "manifest.json").write_text("{")
    with pytest.raises(DataLoss, match="no snapshot"):
        _executor(shared, tmp_path)
