"""examples/agents: an agent on OpenAI's SDK, unchanged, in a whole run: what it was sent is what is in the batches."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.runs.run import TrinityRun, write_config
from trinity.data.archive.reader import read_experiences

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2
# The client notes the ids that the engine sampled, as vLLM's answers have them.
NOTES = """
import json, os
from types import SimpleNamespace


def noting(client):
    async def create(**asked):
        done = await client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
        with open(os.environ["SAMPLED_IDS"], "a") as file:
            for choice in done.choices:
                file.write(json.dumps([done.prompt_token_ids, choice.token_ids]) + "\\n")
        return done

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
"""


@pytest.fixture
def run(repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path) -> Iterator[TrinityRun]:
    shutil.copytree(repository / "examples/agents/plugins", tmp_path / "plugins")
    (tmp_path / "plugins/notes.py").write_text(NOTES)
    workflow = tmp_path / "plugins/sums_workflow.py"
    given = workflow.read_text().replace("agent.asynchronous", "noting(agent.asynchronous)")
    workflow.write_text(f"from notes import noting\n{given}")
    changes = {
        "model": {"model_path": str(quickstart_model), "max_response_tokens": 24},
        "algorithm": {"repeat_times": 2},
        "buffer": {
            "batch_size": 4,
            "total_steps": STEPS,
            "explorer_input": {
                "taskset": {"path": str(quickstart_data)},
                "eval_tasksets": [],
            },
            "trainer_input": {"experience_buffer": {"path": str(tmp_path / "trained.jsonl"), "storage_type": "file"}},
        },
        "stages": [],
    }
    config = write_config(repository / "examples/agents/sums.yaml", tmp_path / "sums.yaml", changes)
    started = TrinityRun(config, tmp_path, SAMPLED_IDS=str(tmp_path / "sampled.jsonl"))
    yield started
    started.end()


def test_every_token_that_is_trained_was_sampled_after_the_tokens_before_it(run: TrinityRun, tmp_path: Path) -> None:
    run.start("--plugin-dir", str(tmp_path / "plugins"))
    assert run.finish(700) == 0, run.tail()
    sampled = Counter(
        (tuple(before), tuple(ids)) for before, ids in map(json.loads, (tmp_path / "sampled.jsonl").open())
    )
    groups = list(read_experiences(str(tmp_path / "trained.jsonl"), "experience_buffer"))
    assert len(groups) == STEPS * 4
    found = 0
    for group in groups:
        for experience in group.experiences:
            ids, mask = experience.token_ids.tolist(), experience.action_mask
            begins = [at for at in range(len(mask)) if mask[at] and (at == 0 or not mask[at - 1])]
            for begin in begins:
                end = next((at for at in range(begin, len(mask)) if not mask[at]), len(mask))
                at = experience.prompt_length + begin
                reply = (tuple(ids[:at]), tuple(ids[at : experience.prompt_length + end]))
                assert sampled[reply] > 0, "a reply in the batch that the engine did not sample there"
                sampled[reply] -= 1
                found += 1
    assert found >= STEPS * 4 * 2
