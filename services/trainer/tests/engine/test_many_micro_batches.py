"""The gradient does not depend on the number of micro-batches, even in bfloat16."""

import pytest

from support.programs.trainer.many_shares import Norms, norms_of

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]

# Each of the others is less than the last bit of the first one in bfloat16, which has 8.
SHARES = [256 / 320] + [1 / 320] * 64


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def norms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Norms]:
    return norms_of(tmp_path_factory.mktemp("shares"), request.param, SHARES)


@pytest.mark.parametrize("zero", ["0", "1", "2", "3"])
def test_many_shares_are_one_gradient(zero: str, norms: dict[str, Norms]) -> None:
    found = norms[zero]
    assert found["once"] == pytest.approx(norms["2"]["once"], rel=1e-2)
    assert found["shares"] == pytest.approx(found["once"], rel=1e-2)
    assert found["again"] == pytest.approx(found["shares"], rel=1e-6), "nothing of what was abandoned is left"
