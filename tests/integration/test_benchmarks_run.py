"""The benchmarks' small forms: they run and print their tables. What they measure is looked at by people."""

from pathlib import Path

import pytest

from support.programs import small_form

pytestmark = pytest.mark.extended

TABLES = {
    "buffer.py": ("throughput", "latency", "restart", "memory", "nats-py", "sqlite", "asyncio.Queue"),
    "buffer.py tls": ("mTLS", "ratios of the rounds"),
    "environment.py": ("steps/s", "attached, through the environment service", "50 episodes open at once", "engines"),
    "rollout.py": ("limit", "of plain"),
    "agents.py": ("tools.generate", "session, streamed", "limit"),
    "agents_journal.py": ("without the journal", "a wait, ms", "limit"),
    "traffic.py": ("recorded", "p99", "limit"),
    "turns.py": ("the least busy engine", "the conversation's engine"),
    "trainer.py": ("packing", "packed", "branched", "step-wise", "memory", "growth"),
    "sync.py tls": ("pause, with mTLS and without", "ratios of the pairs"),
    "sync.py": ("pause, requests running", "bare load", "difference, 1% changed", "publish + fetch", "ratio"),
    "adapters.py": ("a swap while requests run", "MB a version", "of merged", "1 held", "8 held", "distance in nats"),
    "sync_storage.py": ("delta", "folder", "s3", "jetstream", "of copy", "limit"),
    "checkpoints.py": ("save to S3", "resume from S3, empty disk", "of copy", "limit"),
    "episode_trees.py": ("sampled tokens", "grpo", "tree", "of grpo"),
    "learning_curves.py players": ("evaluations by steps", "gain", "> 0"),
    "learning_curves.py traffic": ("evaluations by steps", "gain", "> 0"),
    "learning_curves.py distillation": ("evaluations by steps", "gain", "> 0"),
    "sync_membership.py": ("members", "leases lost", "p99 s", "CPU s"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", TABLES)
def test_the_small_form_prints_its_tables(repository: Path, script: str, tmp_path: Path) -> None:
    name, *parts = script.split()
    printed = small_form.printed(repository / "benchmarks" / name, [*parts, "--tiny"], tmp_path / "printed")
    table = [line for line in printed.splitlines() if line and "nats.client" not in line]
    assert len(table) >= 4, printed
    for word in TABLES[script]:
        assert word in printed, printed
