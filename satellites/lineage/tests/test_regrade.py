"""`trinity regrade`: what the new job folder holds, what the command says, and what is refused before anything is made.

A real environment service scores; the parent's buffer is a double.
"""

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.fakes.data.experience import make_group, make_task
from trinity import plugins
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config import load
from trinity.config.parents import Regrade, parent_of
from trinity.config.schema.algorithm import RolloutCorrectionConfig
from trinity.data.experience import Group, VersionSpan
from trinity.data.wire import decode_outcome, encode_outcome
from trinity.lineage import fork as forking
from trinity.lineage import regrade as command
from trinity.reading.errors import RunError
from trinity.reading.run_record import this_version
from trinity.weights.checkpoint_manifest import ManifestWriter
from trinity.weights.checkpoints import checkpoint_folder

pytestmark = pytest.mark.core

NEWEST, KEPT, PER_STEP, ROLLOUTS = 8, (4, 6), 2, 4
PLUGIN = """
from trinity.plugins import reward_function


@reward_function("{name}")
def {name}(item, args):
    if item.response == "reply 3" and item.task["question"] == "{fails}":
        raise ValueError("cannot read it")
    return float(item.response == "reply 0")
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stopped job of 8 steps, whose buffer is a double."""
    job = tmp_path / "jobs/p/n"
    (job / "log").mkdir(parents=True)
    (job / "monitor").mkdir()
    taskset = {
        "name": "t", "path": "d", "default_reward_fn_type": "accuracy_reward",
        "format": {"prompt_key": "question", "response_key": "answer", "reward_fn_key": "grader"},
        "reward_fn_args": {"a": 1},
    }  # fmt: skip
    evaluated = {**taskset, "name": "e", "reward_fn_args": {}, "format": {}}
    other = {**evaluated, "name": "o", "default_reward_fn_type": "math_reward"}
    values = {
        "project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path / "jobs"),
        "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 16},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": ROLLOUTS},
        "buffer": {
            "batch_size": PER_STEP, "total_steps": 20,
            "explorer_input": {"taskset": taskset, "eval_tasksets": [evaluated, other]},
        },
        "explorer": {"max_retry_times": 1},
    }  # fmt: skip
    (job / "config.json").write_text(json.dumps(values))
    (job / "version.json").write_text(json.dumps({"version": this_version()}))
    lines = "".join(json.dumps({"step": step, "actor/loss": 1.0}) + "\n" for step in range(1, NEWEST + 1))
    (job / "monitor/trainer.jsonl").write_text(lines)
    for step in KEPT:
        folder = checkpoint_folder(job, step)
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"run": "parent", "step": step, "rollback": 0}))
        ManifestWriter(folder).write()
        (folder / ".full_checkpoint").touch()
    monkeypatch.setattr(forking, "ask", lambda _, stage, question: answer(question))
    before = dict(plugins.REWARD_FUNCTIONS)
    yield job
    plugins.REWARD_FUNCTIONS.clear()
    plugins.REWARD_FUNCTIONS.update(before)


def stored(ordinal: int, version: int) -> Group:
    """A group in which only the last rollout was paid."""
    row = json.dumps({"question": f"q{ordinal}", "answer": "2"})
    task = make_task(ordinal, repeat_times=ROLLOUTS, row_json=row, format_json='{"response_key": "answer"}')
    made = make_group(task, version)
    experiences = tuple(
        replace(one, reward=float(index == 3), prompt_text="q", response_text=f"reply {index}")
        for index, one in enumerate(made.experiences)
    )
    return replace(made, experiences=experiences, explorer_id=f"explorer-{ordinal % 2}")


CHANGED: dict[str, Any] = {}


def answer(question: Any) -> Any:
    class Buffer:
        async def newest_step(self) -> int:
            return NEWEST

        async def fork_parts(self, step: int, through: int) -> AsyncIterator[bytes]:
            for entry in range(1, min(max(step + 1, through), NEWEST) + 1):
                of = (entry,) if entry <= step else range((entry - 1) * PER_STEP + 1, entry * PER_STEP + 1)
                groups = [pb.LedgerGroup(ordinal=o, task_id=f"sums/0/{o}", newest_version=entry - 1) for o in of]
                said = pb.LedgerEntry(step=entry, groups=groups, skip_reason=CHANGED.get("skipped", {}).get(entry, ""))
                yield pb.BatchPart(entry=said).SerializeToString()
            for later in range(step + 1, min(through, NEWEST) + 1):
                for ordinal in range((later - 1) * PER_STEP + 1, later * PER_STEP + 1):
                    group = CHANGED.get("group", lambda one: one)(stored(ordinal, later - 1))
                    part = pb.BatchGroup(ordinal=ordinal, outcome=encode_outcome(group))
                    yield pb.BatchPart(group=part).SerializeToString()

    return asyncio.run(question(SimpleNamespace(buffer=Buffer())))


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    return write_plugin(tmp_path, "first")


def write_plugin(folder: Path, name: str, fails: str = "") -> Path:
    file = folder / "files" / f"file_of_{folder.parent.name}_{name}.py".replace("-", "_")
    file.parent.mkdir(exist_ok=True, mode=0o700)
    file.write_text(PLUGIN.format(name=name, fails=fails))
    return file


@pytest.fixture
def scored_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Scores in this process: 1 for the first reply. Returns the names that were asked for."""
    asked: list[str] = []

    class Here:
        async def score(self, name: str, items: Sequence[Any], args_json: str) -> list[tuple[float, dict[str, float]]]:
            asked.append(name)
            if CHANGED.get("fails", lambda item: False)(items[0]):
                raise RunError(f"{name}: ValueError: cannot read it")
            return [(float(item["response"] == "reply 0"), {"accuracy": 1.0}) for item in items]

    @contextlib.asynccontextmanager
    async def scorers(folders: Sequence[Path], bound: float) -> AsyncIterator[Here]:
        yield Here()

    monkeypatch.setattr(command, "scorers", scorers)
    CHANGED.clear()
    return asked


def groups(folder: Path) -> list[pb.BatchGroup]:
    parts = [pb.BatchPart.FromString(part) for part in command._read(folder / "fork/parts.bin")]
    return [part.group for part in parts if part.WhichOneof("part") == "group"]


def rewards(group: pb.BatchGroup) -> list[float]:
    found = decode_outcome(group.outcome)
    assert isinstance(found, Group)
    return [one.reward for one in found.experiences]


def make(job: Path, *overrides: str, **options: Any) -> Path:
    assert command.regrade(str(job), list(overrides), **options) == 0
    return max(job.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_a_service_of_this_command_scores_with_the_file_of_a_plugin(
    job: Path, plugin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CHANGED.clear()
    folder = make(job, reward=str(plugin), start=4, reuse=2)
    assert folder.name == "n-regrade"
    made = groups(folder)
    assert [rewards(one) for one in made] == [[1.0, 0.0, 0.0, 0.0]] * 4
    assert all(len(one.parent_sha256) == 32 and not one.left_out for one in made)
    assert (folder / "plugins" / plugin.name).read_text() == plugin.read_text()
    said = capsys.readouterr().out
    assert "trains 4 groups of p/n after step 4, up to step 6, with rewards of first again; then it samples" in said
    assert "rewards changed: 8 of 16, in 4 groups; mean 0.25 -> 0.25" in said
    assert "order changed in 4 groups" in said
    assert f"--plugin-dir {folder}/plugins" in said or "/n-regrade/plugins" in said
    parent = parent_of(folder)
    assert parent is not None
    assert parent.regrade is not None
    assert (parent.regrade.through_step, parent.regrade.reward, parent.regrade.groups) == (6, "first", 4)
    assert len(parent.regrade.sha256) == 64


def test_only_the_group_that_ends_the_scoring_process_is_left_out(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a crash of a library or the kernel's lack of memory does."""
    CHANGED.clear()
    monkeypatch.setattr(command, "_TELL_SECONDS", 0.1)
    plugin = write_plugin(tmp_path, "ending", "q11")
    plugin.write_text(plugin.read_text().replace('raise ValueError("cannot read it")', '__import__("os")._exit(139)'))
    folder = make(job, reward=str(plugin), start=4)
    assert {one.ordinal: one.left_out for one in groups(folder) if one.left_out} == {11: "not_graded"}
    told = capsys.readouterr()
    assert "failed: 1 groups: ending ended its process" in told.out
    assert re.search(r"^\d of 8 groups are done, \d failed$", told.err, re.MULTILINE)


def test_later_tasks_and_their_evaluation_get_the_new_function_and_corrected_weights(
    job: Path, scored_here: list[str]
) -> None:
    config = load(make(job, reward="math_boxed_reward") / "fork.yaml", plugins_loaded=False)
    source = config.buffer.explorer_input
    assert source.taskset is not None
    assert source.taskset.default_reward_fn_type == "math_boxed_reward"
    assert (source.taskset.format.reward_fn_key, source.taskset.reward_fn_args) == ("", {"a": 1})
    assert [one.default_reward_fn_type for one in source.eval_tasksets] == ["math_boxed_reward", "math_reward"]
    assert config.algorithm.rollout_correction == RolloutCorrectionConfig(decoupled=False)
    assert set(scored_here) == {"math_boxed_reward"}


@pytest.mark.parametrize(
    ("overrides", "cap", "tokens"),
    [
        (["algorithm.rollout_correction.decoupled=true", "algorithm.rollout_correction.token_cap=5"], 5.0, None),
        (["algorithm.rollout_correction.token_range=[0.5, 5]"], None, (0.5, 5)),
        (["algorithm.policy_loss_fn=opmd_kimi"], None, None),
    ],
)
def test_a_given_correction_stays(
    job: Path, scored_here: list[str], overrides: list[str], cap: float | None, tokens: Any
) -> None:
    folder = make(job, *overrides, reward="math_reward")
    correction = load(folder / "fork.yaml", plugins_loaded=False).algorithm.rollout_correction
    assert (correction.token_cap, correction.token_range) == (cap, tokens)
    assert (correction.sequence_cap is not None) == ("opmd" in overrides[0])


def test_groups_are_left_out_with_their_reason_and_keep_their_rewards(
    job: Path, scored_here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(
        job, without_task=["sums/0/9"], without_explorer=["explorer-0"], without_version=["6-7"], start=4, as_json=True
    )
    said = json.loads(capsys.readouterr().out)
    reasons = {one.ordinal: one.left_out for one in groups(folder)}
    assert reasons == {
        9: "without_task", 10: "without_explorer", 11: "", 12: "without_explorer",
        13: "without_version", 14: "without_explorer", 15: "without_version", 16: "without_explorer",
    }  # fmt: skip
    assert {tuple(rewards(one)) for one in groups(folder)} == {(0.0, 0.0, 0.0, 1.0)}
    assert said["changes"]["left_out"] == {"without_task": 1, "without_explorer": 4, "without_version": 2}
    assert not scored_here
    parent = parent_of(folder)
    assert parent is not None
    assert parent.regrade == Regrade(
        8, groups=8, left_out=said["changes"]["left_out"], without_tasks=("sums/0/9",),
        without_explorers=("explorer-0",), without_versions=("6-7",),
    )  # fmt: skip


def test_groups_of_skipped_steps_are_left_out(job: Path, scored_here: list[str]) -> None:
    CHANGED["skipped"] = {3: "poisoned", 6: "poisoned"}
    folder = make(job, reward="math_reward", start=4)
    assert {one.ordinal: one.left_out for one in groups(folder) if one.left_out} == {
        11: "skipped_step", 12: "skipped_step",
    }  # fmt: skip


def test_what_stays_in_the_weights_is_said(
    job: Path, scored_here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make(job, without_task=["sums/0/[39]", "sums/0/10"], without_explorer=["explorer-0"], start=4, as_json=True)
    stay = "groups that steps up to 4 have trained stay in the weights"
    assert json.loads(capsys.readouterr().out)["notes"] == [
        f"--without-tasks sums/0/[39]: 1 {stay}", f"--without-explorer explorer-0: {stay}",
    ]  # fmt: skip
    make(job, without_version=["2-6"], start=4)
    assert f"note: --without-versions 2-6: 2 {stay}" in capsys.readouterr().out


def test_a_group_that_cannot_be_scored_is_left_out_and_never_gets_zero(
    job: Path, scored_here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    CHANGED["fails"] = lambda item: '"q11"' in item["task_json"]
    folder = make(job, reward="math_reward", start=4)
    assert {one.ordinal: one.left_out for one in groups(folder) if one.left_out} == {11: "not_graded"}
    assert "failed: 1 groups: math_reward: ValueError: cannot read it" in capsys.readouterr().out
    assert len(scored_here) == 8 + 1, "as often as a task of the run may fail"


def test_if_all_fail_nothing_is_made(job: Path, scored_here: list[str]) -> None:
    CHANGED["fails"] = lambda item: True
    with pytest.raises(RunError, match="no stored group of steps 5 to 8 can be trained: math_reward: ValueError"):
        make(job, reward="math_reward", start=4)
    assert [path.name for path in job.parent.iterdir()] == ["n"]


def test_what_the_log_lacks_ends_the_command(job: Path, scored_here: list[str]) -> None:
    def turns(group: Group) -> Group:
        return replace(
            group, experiences=tuple(replace(one, rollout=0, step=i) for i, one in enumerate(group.experiences))
        )

    CHANGED["group"] = turns
    with pytest.raises(RunError, match=r"task sums/0/9: simple_workflow stores a rollout as several experiences"):
        make(job, reward="math_reward", start=4)
    assert [path.name for path in job.parent.iterdir()] == ["n"]


def test_a_group_of_two_versions_is_left_out_by_either(job: Path, scored_here: list[str]) -> None:
    def two(group: Group) -> Group:
        first = group.experiences[0]
        newest = first.version_spans[0].version
        spans = (VersionSpan(newest - 1, 0, 5), VersionSpan(newest, 5, first.response_length))
        return replace(group, experiences=(replace(first, version_spans=spans), *group.experiences[1:]))

    CHANGED["group"] = two
    folder = make(job, without_version=["6"], start=4)
    assert {one.ordinal for one in groups(folder) if one.left_out} == {13, 14, 15, 16}, "versions 5-6 and 6-7"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"give --reward NAME, or what to leave out"),
        ({"reward": "acuracy_reward"}, r"no such reward function; known: .*accuracy_reward.*a plugin needs its folder"),
        ({"reward": "gone.py"}, r"--reward gone.py: there is no file .*/gone.py"),
        ({"reward": "math_reward", "plugin_dir": [Path("/nowhere/at")]}, r"plugin folder '/nowhere/at' does not exist"),
        ({"reward": "math_reward", "start": 5}, r"step 5: there is no checkpoint of this step, the run keeps 4, 6"),
        ({"reward": "math_reward", "start": 9}, r"step 9: p/n has trained 8 steps"),
        ({"without_version": ["7-6"]}, r"--without-versions 7-6: give FIRST-LAST"),
        ({"without_version": ["x"]}, r"--without-versions x: give FIRST-LAST"),
        ({"without_task": ["*", "nothing/*"]}, r"matches; there are sums/0/9, sums/0/10, .* and 3 more$"),
        ({"without_task": ["sums/0/3"]}, r"matches, and 1 groups that steps up to 4 have trained stay in the weights"),
        ({"without_explorer": ["explorer-2"]}, r"matches; there are explorer-0, explorer-1$"),
        ({"without_version": ["9"]}, r"9-9: no .* 5 to 8 matches; there are \d, .*"),
        ({"without_task": ["*"]}, r"no stored group of steps 5 to 8 can be trained: 8 groups are left out"),
    ],
)  # fmt: skip
def test_bad_input_makes_nothing(job: Path, scored_here: list[str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError, match=said):
        make(job, **options)
    assert [path.name for path in job.parent.iterdir()] == ["n"]


def test_steps_that_the_parent_has_released_are_named(
    job: Path, scored_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Any, stage: Any, question: Any) -> Any:
        raise RunError("log: entry 12 was released")

    monkeypatch.setattr(forking, "ask", gone)
    with pytest.raises(RunError, match=r"step 4: log: entry 12 was released; checkpoints of the run: 4, 6"):
        make(job, reward="math_reward", start=4)
    assert [path.name for path in job.parent.iterdir()] == ["n"]


def test_the_record_has_the_digest_of_the_groups(job: Path, scored_here: list[str]) -> None:
    folder = make(job, reward="math_reward", start=4)
    parent = parent_of(folder)
    assert parent is not None
    assert parent.parts == hashlib.sha256((folder / "fork/parts.bin").read_bytes()).hexdigest()


def test_files_without_one_reward_function_are_refused(job: Path, tmp_path: Path, scored_here: list[str]) -> None:
    two = write_plugin(tmp_path, "one")
    two.write_text(two.read_text() + PLUGIN.format(name="two", fails=""))
    with pytest.raises(RunError, match=r"has one, two: give FILE.py:NAME"):
        make(job, reward=str(two))
    empty = write_plugin(tmp_path, "none")
    empty.write_text("x = 1\n")
    with pytest.raises(RunError, match="has no reward function"):
        make(job, reward=str(empty))
    broken = write_plugin(tmp_path, "broken")
    broken.write_text("import nothing_of_this_name\n")
    with pytest.raises(RunError, match=r"--reward .*: .*ModuleNotFoundError"):
        make(job, reward=str(broken))


def test_another_version_a_dataset_and_replay_are_refused(job: Path, scored_here: list[str]) -> None:
    config = json.loads((job / "config.json").read_text())
    replay = {**config, "buffer": {**config["buffer"], "trainer_input": {"experience_buffer": {
        "name": "x", "storage_type": "queue", "replay_buffer": {"enable": True}}}}}  # fmt: skip
    (job / "config.json").write_text(json.dumps(replay))
    with pytest.raises(RunError, match="may use a group several times"):
        make(job, reward="math_reward")
    (job / "config.json").write_text(json.dumps(config))
    (job / "version.json").write_text('{"version": "0.1.7"}')
    with pytest.raises(RunError, match=r"was begun with Trinity 0\.1\.7"):
        make(job, reward="math_reward")


def test_the_report_has_the_distance_of_each_step(
    job: Path, scored_here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match="is no regrade"):
        command.regrade(str(job), report=True)
    folder = make(job, reward="math_reward", start=4, reuse=2)
    capsys.readouterr()
    lines = [
        {"step": step, "sample/staleness_mean": step - 4.0, "sample/reward_mean": 0.5}
        | ({"sample/regraded_groups": 2.0, "actor/mismatch/stale_kl": 0.01 * step} if step < 7 else {})
        for step in range(5, 12)
    ]
    (folder / "log").mkdir()
    (folder / "version.json").write_text((job / "version.json").read_text())
    (folder / "config.json").write_text((job / "config.json").read_text().replace('"n"', '"n-regrade"'))
    (folder / "monitor").mkdir()
    (folder / "monitor/trainer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command.regrade(str(folder), report=True) == 0
    said = capsys.readouterr().out
    assert "steps 5 to 6 trained groups of p/n" in said
    assert len([line for line in said.splitlines() if line.strip()[:1].isdigit()]) == 5, "and three steps after them"
    assert command.regrade(str(folder), report=True, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["last_regraded_step"], found["parent"]["regrade"]["through_step"]) == (6, 6)
    assert [one["kl"] for one in found["steps"]][:3] == [0.05, 0.06, None]
    assert found["changes"]["groups"] == 4
