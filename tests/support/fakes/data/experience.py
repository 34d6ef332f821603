"""Groups as an explorer makes them, with random tokens."""

import time

import numpy as np

from trinity.data.experience import Experience, Group, SamplingParams, Task, TaskKind, VersionSpan


def make_task(ordinal: int = 1, **changes: object) -> Task:
    values = {
        "run": "tests-run-000000",
        "task_id": f"sums/0/{ordinal}",
        "ordinal": ordinal,
        "kind": TaskKind.TRAIN,
        "taskset": "sums",
        "epoch": 0,
        "row": ordinal,
        "row_json": '{"question": "1+1", "answer": "#### 2"}',
        "format_json": "{}",
        "workflow": "simple_workflow",
        "workflow_args_json": "{}",
        "reward_function": "accuracy_reward",
        "reward_args_json": "{}",
        "repeat_times": 4,
        "sampling": SamplingParams(max_tokens=16, n=4),
        "gate_step": 0,
        "evaluation_step": 0,
        "timeout_seconds": 60.0,
        "max_attempts": 3,
    }
    return Task(**{**values, **changes})  # type: ignore[arg-type]


def make_experience(rng: np.random.Generator, rollout: int, response: int, version: int) -> Experience:
    prompt = int(rng.integers(1, 8))
    return Experience(
        rollout=rollout,
        step=0,
        token_ids=rng.integers(0, 100, prompt + response).astype(np.int32),
        prompt_length=prompt,
        logprobs=-rng.random(response).astype(np.float32),
        action_mask=np.ones(response, dtype=bool),
        reward=float(rng.integers(0, 2)),
        version_spans=(VersionSpan(version, 0, response),) if response else (),
    )


def make_group(task: Task, version: int = 0, attempt: int = 1, response: int = 12) -> Group:
    """The same task gives the same group, except for the attempt."""
    rng = np.random.default_rng(task.ordinal)
    experiences = tuple(make_experience(rng, index, response, version) for index in range(task.repeat_times))
    return Group(task, attempt, "tester", experiences, time.time(), time.time())
