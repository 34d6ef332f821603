"""Prompts over model.max_prompt_tokens are cut and not trained; the buffer counts them, also over a kill, and warns."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.fakes.data.experience import make_group
from support.fakes.peers import a_group, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.data.experience import Outcome, Task, Truncation
from trinity.explorer.rollout.attempt import PROMPTS_CUT
from trinity.reading.wire import every_prompt_is_cut, prompts_cut

pytestmark = pytest.mark.core


def a_cut_group(task: Task, deliveries: int) -> Outcome:
    group = make_group(task, version=task.gate_step, attempt=deliveries)
    none = np.zeros_like(group.experiences[0].action_mask)
    cut = tuple(replace(e, truncation=Truncation.PROMPT, action_mask=none) for e in group.experiences)
    return replace(group, experiences=cut)


async def test_cut_prompts_are_counted_and_told(tmp_path: Path, nats_server: NatsServer) -> None:
    def first_batch_is_cut(task: Task, deliveries: int) -> Outcome:
        return (a_cut_group if task.ordinal <= run.groups else a_group)(task, deliveries)

    run = BufferRun(tmp_path, nats_server, synchronizer={"sync_interval": 1}).start()
    trainer = run.trainer()
    before = PROMPTS_CUT.labels("train")._value.get()
    try:
        await trainer.begin()
        async with explorer(run.nats.url, run.run, first_batch_is_cut):
            await trainer.batch(1)
            stats = await trainer.stats()
            assert (stats.stored, stats.prompts_cut, stats.sampled_tokens) == (run.groups, run.groups, 0)
            assert every_prompt_is_cut(stats)
            assert "so no token is trained" in prompts_cut(stats)
            run.buffer.kill()
            run.buffer.start()
            await trainer.publish(1, tmp_path / "w1")
            await trainer.batch(2)
        stats = await trainer.stats()
        assert (stats.prompts_cut, every_prompt_is_cut(stats)) == (run.groups, False)
        assert prompts_cut(stats).startswith(f"{run.groups} of {stats.stored} prompts are longer")
        assert PROMPTS_CUT.labels("train")._value.get() == before + run.groups
        said = [event for event in run.buffer.events() if event["event"] == "buffer.prompt.cut"]
        assert [event["cut"] for event in said] == [2**n for n in range(run.groups.bit_length())]
    finally:
        await trainer.close()
        run.stop()
