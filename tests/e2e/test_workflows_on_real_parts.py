"""Workflows on a real vLLM engine, a real environment service, and at last in a whole run."""

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from support.fakes.explorers.toolbox import make_episode_task
from support.programs.run import TrinityRun
from support.servers.service import ServiceProcess
from support.servers.shared_engine import MAX_LENGTH
from trinity.compat_rft import r3l
from trinity.compat_rft.reflection import Outcome, Report
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Experience, Group, Task
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.auxiliary import AuxiliaryModels, Judge
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.study.results import collect

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(500)]

LEVEL = "#######\n#P_X_O#\n#_____#\n#######"
SHORT = {"environment": "sokoban", "environment_args": {"max_steps": 3}}


@asynccontextmanager
async def toolbox(pool: EnginePool, model: Path, folder: Path) -> AsyncIterator[ExplorerTools]:
    """What workflows get; the policy is its own teacher."""
    service = ServiceProcess("environment", folder).start()
    client = EnvironmentClient(service.address)
    try:
        tokenizer = ChatTokenizer(ModelConfig(model_path=str(model)))
        auxiliary = AuxiliaryModels({"teacher": Judge(pool, tokenizer)})
        yield ExplorerTools(pool, tokenizer, client, auxiliary, MAX_LENGTH, MAX_LENGTH, teacher_top=4)
    finally:
        await client.close()
        service.kill()


def task(workflow: str, row: dict[str, Any], args: dict[str, Any], n: int = 2, tokens: int = 12) -> Task:
    given = {"row_json": json.dumps(row), "format": {"prompt_key": "question", "response_key": "answer"}}
    return make_episode_task(json.dumps(args), n, workflow=workflow, max_tokens=tokens, **given)


def computed(model: Any, experience: Experience) -> np.ndarray:
    """Log-probabilities of the response tokens by transformers."""
    tokens = torch.from_numpy(experience.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        found = torch.log_softmax(model(tokens).logits[0].double(), -1)
    chosen = found[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    return chosen[experience.prompt_length - 1 :].numpy()


@pytest.mark.asyncio(loop_scope="session")
async def test_every_trained_token_has_the_log_probability_it_has_in_its_conversation(
    pool: EnginePool, quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(Outcome.FAILURE, 1, "It waited.", "It did nothing.", "Push the box to the right.")
    monkeypatch.setattr(r3l, "read", lambda reply, steps: report)
    row, sums = {"level": LEVEL}, {"question": "1+1", "answer": "2"}
    tasks = {
        "whole": task("environment_workflow", row, SHORT),
        "steps": task("environment_workflow", row, {**SHORT, "step_wise": True}),
        "r3l": task("R3L_workflow", row, {**SHORT, "max_reflection_tokens": 32}),
        "taught": task("on_policy_distill_workflow", sums, {"teacher": "teacher"}),
        "told": task("on_policy_distill_workflow", sums, {"teacher": "policy", "privileged": "It is {answer}."}),
    }

    groups: dict[str, Group] = {}
    async with toolbox(pool, quickstart_model, tmp_path) as tools:
        found = await asyncio.gather(*(attempt.explore(t, 1, "me", tools) for t in tasks.values()))
    for name, outcome in zip(tasks, found, strict=True):
        assert isinstance(outcome, Group), outcome
        groups[name] = outcome
    model = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32).eval()
    for name, group in groups.items():
        for experience in group.experiences:
            if json.loads(experience.info_json or "{}").get("distilled"):
                continue  # sampled with guidance, trained without
            expected = computed(model, experience)[experience.action_mask]
            np.testing.assert_allclose(experience.logprobs[experience.action_mask], expected, atol=2e-4, err_msg=name)

    whole = groups["whole"].experiences[0]
    assert whole.metrics["steps"] == 3, "the environment's own limit"
    assert 0 < whole.action_mask.sum() < whole.response_length
    assert [(e.rollout, e.step) for e in groups["steps"].experiences] == [(r, s) for r in (0, 1) for s in range(3)]
    first, second = groups["r3l"].experiences[:2]
    assert second.metrics["second_steps"] == 3
    assert second.metrics["replay_differs"] == 0
    assert second.metrics["second_improve"] in (0, 1)
    assert second.metrics["second_reward_diff"] == second.metrics["second_reward"] - first.reward
    shared = int(np.flatnonzero(first.action_mask)[0])
    assert (
        first.token_ids[first.prompt_length :][:shared].tolist()
        == second.token_ids[second.prompt_length :][:shared].tolist()
    )
    taught = groups["taught"].experiences[0]
    assert taught.teacher_logprobs is not None
    np.testing.assert_allclose(taught.teacher_logprobs, taught.logprobs, atol=2e-4, err_msg="it is its own teacher")
    told, asked = groups["told"].experiences[0], [{"role": "user", "content": "1+1\n\nIt is 2."}]
    prompt = np.array(ChatTokenizer(ModelConfig(model_path=str(quickstart_model))).prompt(asked), np.int32)
    for experience, ids in (
        (taught, taught.token_ids), (told, np.concatenate([prompt, told.token_ids[told.prompt_length :]]))
    ):  # fmt: skip
        with torch.no_grad():
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -experience.response_length - 1 : -1]
        likeliest, top = logits.double().log_softmax(-1).topk(4), experience.teacher_top
        assert top is not None
        np.testing.assert_allclose(top.logprobs, likeliest.values, atol=2e-4)
        assert (top.ids == likeliest.indices.numpy()).mean() > 0.9, "all but near ties"


ROWS: dict[str, list[dict[str, Any]]] = {
    "countdown": [{"nums": [n, 2, 3], "target": n + 5} for n in range(1, 5)],
    "dapo": [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(4)],
    "sokoban": [{"seed": n, "size": 6, "boxes": 1} for n in range(4)],
    "gym_card": [{"game": game, "seed": 1} for game in ("number_line", "ez_points", "points24", "blackjack")],
    "webshop": [{"session_id": n} for n in range(4)],
    "alfworld": [{"game_file": None, "seed": n} for n in range(4)],
    "scienceworld": [{"task_name": "find-plant", "var_num": n} for n in range(4)],
}
NEEDS = {"alfworld": "textworld", "scienceworld": "scienceworld"}
INSTALLED = [n for n in ROWS if n not in NEEDS or importlib.util.find_spec(NEEDS[n]) is not None]


@pytest.fixture
def all_environments(repository: Path, quickstart_model: Path, tmp_path: Path) -> Iterator[TrinityRun]:
    """R3L's experiments of all environments that are installed, as one run of a tiny model."""
    values: dict[str, Any] = {}
    tasksets, evaluations = [], []
    for name in INSTALLED:
        path = repository / f"examples/R3L/{name}/opmd_R3L_1.5B.yaml"
        values = yaml.safe_load(path.read_text())
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in ROWS[name][: 2 + 2 * (split == "train")])
            )
        source = values["buffer"]["explorer_input"]
        tasksets.append(source["taskset"] | {"path": str(folder)})
        evaluations.append(source["eval_tasksets"][0] | {"path": str(folder), "split": "test", "name": name})
    values |= {"project": "r3l", "name": "all"}
    values["buffer"] |= {"batch_size": len(tasksets), "total_steps": 2}
    values["buffer"]["explorer_input"] = {"tasksets": tasksets, "eval_tasksets": evaluations}
    values["algorithm"]["repeat_times"] = 2
    values["model"] |= {"model_path": str(quickstart_model), "max_model_len": 3072, "max_response_tokens": 24}
    values["cluster"]["gpu_per_node"] = 0
    values["monitor"]["monitor_type"] = "none"
    config = tmp_path / "all.yaml"
    config.write_text(yaml.safe_dump(values))
    started = TrinityRun(config, tmp_path)
    yield started
    started.end()


def test_r3l_on_every_environment_trains_two_steps_and_ends_with_its_metrics(all_environments: TrinityRun) -> None:
    run = all_environments
    run.start()
    assert run.finish(400) == 0, run.tail()
    found: dict[str, float] = {}
    for line in (run.job / "monitor/explorer.jsonl").read_text().splitlines():
        found |= json.loads(line)
    for name in ("success", "steps", "reflect_valid", "invalid_format", "reward"):
        assert f"rollout/{name}/mean" in found, sorted(found)
    for name in INSTALLED:
        assert found[f"eval/{name}/finished_task_count"] == 2, name
        assert 0 <= found[f"eval/{name}/success/mean@1"] <= 1
        assert found[f"eval/{name}/steps/mean@1"] >= 1, name
    assert found["eval/countdown/steps/mean@1"] == 3, "all three attempts, of a model that knows nothing"
    assert found["eval/sokoban/invalid_format/mean@1"] == 1, "a first reply without an action ends the episode"
    trained = [json.loads(line)["step"] for line in (run.job / "monitor/trainer.jsonl").read_text().splitlines()]
    assert trained == [1, 2]
    table = collect([run.job], ["success"])
    assert {curve.taskset for curve in table} >= {"countdown", "sokoban"}
