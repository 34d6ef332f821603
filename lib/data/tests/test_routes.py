"""Recorded routes travel compressed, and are bounded before they are decompressed."""

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.config.experts import Mixture
from trinity.data.experience import UNLIMITED, Group
from trinity.data.routes import MOST_BYTES_OF_A_TOKEN, Routes
from trinity.data.wire import decode_outcome, encode_outcome
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


def ids_of(tokens: int, experts: int, layers: int = 3, chosen: int = 2) -> np.ndarray:
    found = np.random.default_rng(tokens).integers(0, experts, (tokens - 1, layers, chosen))
    return found.astype(np.uint8 if experts <= 256 else np.uint16)


def recorded(experts: int = 8) -> Group:
    group = make_group(make_task(3))
    return replace(group, experiences=tuple(
        replace(one, routes=Routes.of(ids_of(len(one.token_ids), experts))) for one in group.experiences
    ))  # fmt: skip


@pytest.mark.parametrize("experts", [8, 256, 384])
def test_they_return_from_the_log_as_they_were(experts: int) -> None:
    group = recorded(experts)
    found = decode_outcome(encode_outcome(group))
    assert isinstance(found, Group)
    found.check()
    found.check(replace(UNLIMITED, mixture=Mixture(3, 2, experts)))
    for one in found.experiences:
        length = len(one.token_ids)
        assert one.routes is not None
        assert one.routes.id_bytes == (1 if experts <= 256 else 2)
        assert np.array_equal(one.routes.ids(length), ids_of(length, experts))


def test_a_single_token_has_none_and_an_experience_without_routes_stays_so() -> None:
    assert Routes.of(ids_of(1, 8)).ids(1).shape == (0, 3, 2)
    found = decode_outcome(encode_outcome(make_group(make_task(4))))
    assert isinstance(found, Group)
    assert all(one.routes is None for one in found.experiences)


def changed(**values: Any) -> Group:
    group = recorded()
    first, *others = group.experiences
    assert first.routes is not None
    given = {name: value(first.routes) if callable(value) else value for name, value in values.items()}
    return replace(group, experiences=(replace(first, routes=replace(first.routes, **given)), *others))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"id_bytes": 4}, "id_bytes"),
        ({"layers": 0}, "routes"),
        ({"layers": MOST_BYTES_OF_A_TOKEN, "chosen": 2}, "routes"),
        ({"chosen": 3}, "data"),
        ({"data": b"no zlib"}, "data"),
        ({"data": lambda routes: routes.data[:-5]}, "data"),
        ({"data": lambda routes: routes.data + b"more"}, "data"),
        ({"data": zlib.compress(b"\0" * 10**7)}, "data"),
    ],
)
def test_malformed_routes_are_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        changed(**values).check()
    assert refused.value.field.startswith("group.experiences[0].routes")
    assert refused.value.field.endswith(field)


@pytest.mark.parametrize("mixture", [Mixture(4, 2, 8), Mixture(3, 1, 8), Mixture(3, 2, 7)])
def test_routes_of_another_model_are_refused(mixture: Mixture) -> None:
    with pytest.raises(InvalidInput, match=r"routes(\.data)?: (are of 3 layers|has expert 7; ids are below 7)"):
        recorded().check(replace(UNLIMITED, mixture=mixture))
