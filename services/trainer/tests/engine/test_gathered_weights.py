"""Every rank reads weights that ZeRO-3 shards as whole tensors, bit for bit equal to DeepSpeed's, and changes
nothing."""

from pathlib import Path

import pytest

from support.programs.forked import fork
from support.programs.trainer.gathered import CASES, read_by_rank
from trinity.runtime.process import free_port

pytestmark = [pytest.mark.core, pytest.mark.timeout(240)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_reads_what_deepspeed_gathers(ranks: int, tmp_path: Path) -> None:
    port = free_port()
    processes = [fork(read_by_rank, (rank, ranks, port, str(tmp_path))) for rank in range(ranks)]
    for process in processes:
        process.join(150)
    for process in processes:
        process.kill()
    assert {path.name for path in tmp_path.iterdir()} == {f"{c}-{r}" for c in range(len(CASES)) for r in range(ranks)}
