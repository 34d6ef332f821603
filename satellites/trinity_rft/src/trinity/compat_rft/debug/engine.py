"""Runs workflows on one engine for `trinity debug`, without a run, a log or published weights.

Each line of standard input is a question in JSON, each line of standard output its answer: {"task": ...} gets the
outcome of an attempt at the task, {"reload": true} imports the plugin files again. All other output goes to standard
error.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from typing import Any, TextIO

import structlog

from trinity.compat_rft.debug.reload import reload
from trinity.config.service import load_plan
from trinity.data.experience import AttemptFailure, Experience, Limits, Outcome
from trinity.data.wire import task_from_json
from trinity.explorer.build import ExplorerBuilder
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.settings import ExplorerSettings
from trinity.plugins import PluginError
from trinity.runtime import host, logs, process
from trinity.runtime.settings import load_settings
from trinity.runtime.torch_builds import hide_unusable_companions
from trinity.runtime.trust import identity

log = structlog.get_logger(__name__)

_NAME = "debug"


def main() -> None:
    """Answer until standard input ends. A failure is logged, with exit code 1."""
    process.die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints
    hide_unusable_companions()
    settings = load_settings(ExplorerSettings)
    logs.configure("explorer", level=settings.log_level, file=settings.log_file, mib=settings.log_mib)
    code = 0
    try:
        identity.configure(host.identity_of("explorer", settings))
        asyncio.run(_answer_all(settings, answers))
    except Exception as error:
        log.exception("service.failed", reason=str(error) or type(error).__name__)
        code = 1
    process.end(code)


async def _answer_all(settings: ExplorerSettings, answers: TextIO) -> None:
    plan = load_plan(settings.config_file, settings.stage, settings.plugin_dirs)
    build = ExplorerBuilder(plan, settings, _NAME, _NAME)
    tokenizer = await asyncio.to_thread(ChatTokenizer, plan.config.model)
    options = build.engine_options(tokenizer.turn_end)
    process.guard_group()  # vLLM's processes do not notice that this one was killed
    with contextlib.closing(await build.pool(options)) as pool:
        tools = await build.tools(options, pool, tokenizer)
        try:
            _say(answers, {"ready": True})
            while line := await asyncio.to_thread(sys.stdin.readline):
                _say(answers, await _answer(json.loads(line), tools, build.limits(), settings))
        finally:
            await tools.close()


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


async def _answer(
    question: dict[str, Any], tools: ExplorerTools, limits: Limits, settings: ExplorerSettings
) -> dict[str, Any]:
    if "reload" in question:
        try:
            reload([folder for folder in settings.plugin_dirs.split(os.pathsep) if folder])
        except PluginError as error:
            return {"problem": str(error)}
        return {"problem": ""}
    begin = time.monotonic()
    outcome = await attempt.explore(task_from_json(question["task"]), 1, _NAME, tools, limits)
    return {"seconds": round(time.monotonic() - begin, 3), **_shown(outcome, tools)}


def _shown(outcome: Outcome, tools: ExplorerTools) -> dict[str, Any]:
    if isinstance(outcome, AttemptFailure):
        return {"failure": {"cause": str(outcome.cause), "error": outcome.error}, "experiences": []}
    return {"failure": None, "experiences": [_experience(one, tools) for one in outcome.experiences]}


def _experience(one: Experience, tools: ExplorerTools) -> dict[str, Any]:
    """`token_ids` [P + R], `logprobs` and `mask` [R], texts, and the reward with its parts."""
    prompt, response = one.token_ids[: one.prompt_length], one.token_ids[one.prompt_length :]
    return {
        "rollout": one.rollout,
        "step": one.step,
        "prompt": one.prompt_text or tools.text(prompt),
        "response": one.response_text or tools.reply(response),
        "prompt_tokens": one.prompt_length,
        "response_tokens": len(response),
        "reward": float(one.reward),
        "metrics": {name: float(value) for name, value in one.metrics.items()},
        "truncation": one.truncation.name.lower(),
        "info": json.loads(one.info_json) if one.info_json else {},
        "token_ids": one.token_ids.tolist(),
        "mask": one.action_mask.astype(int).tolist(),
        "logprobs": [round(float(value), 6) for value in one.logprobs],
    }


if __name__ == "__main__":
    main()
