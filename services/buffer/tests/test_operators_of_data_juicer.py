"""Data-Juicer's filters as experience operators, by a stand-in with the interface of its Filter."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support.fakes.data.operators import KEY, PLACE, experience, group_of, kept, pipeline, run
from trinity.data.experience import Group
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

# Data-Juicer's filters, by a stand-in with the interface of its Filter


class LengthFilter:
    def __init__(self, min_len: int = 0, text_key: str = "text") -> None:
        self.min_len, self.text_key = min_len, text_key

    def compute_stats_batched(self, samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for text, stats in zip(samples[self.text_key], samples["__dj__stats__"], strict=True):
            stats["lang"] = "en"
            if "text_len" not in stats:  # as the real one
                stats["text_len"] = len(text)
        return samples

    def process_batched(self, samples: dict[str, list[Any]]) -> Iterator[bool]:
        return (stats["text_len"] >= self.min_len for stats in samples["__dj__stats__"])


@pytest.fixture
def juicer(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"text_length_filter": LengthFilter, "clean_links_mapper": lambda: SimpleNamespace()}
    modules = {name: ModuleType(name) for name in ("data_juicer", "data_juicer.ops", "data_juicer.utils")}
    modules["data_juicer.utils.constant"] = ModuleType("constant")
    modules["data_juicer.ops"].load_ops = lambda ops: [known[n](**a) for op in ops for n, a in op.items()]  # type: ignore[attr-defined]
    modules["data_juicer.utils.constant"].Fields = SimpleNamespace(stats="__dj__stats__")  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


TEXTS = (("what?", "four"), ("why?", "because of it"), ("a longer question", "no"))


def spoken() -> Group:
    return group_of(*(experience(0.0, i, prompt_text=p, response_text=r) for i, (p, r) in enumerate(TEXTS)))


@pytest.mark.usefixtures("juicer")
@pytest.mark.parametrize(("args", "left"), [({"min_len": 4}, [0, 1]), ({"min_len": 5, "text_key": "prompt"}, [0, 2])])
def test_filters_of_data_juicer_drop_experiences_by_their_texts(args: dict[str, Any], left: list[int]) -> None:
    assert kept(run(spoken(), "data_juicer", operators=[{"text_length_filter": args}])) == left


@pytest.mark.usefixtures("juicer")
def test_two_filters_of_one_name_look_at_a_column_each() -> None:
    filters = [{"text_length_filter": {"min_len": 3}}, {"text_length_filter": {"min_len": 5, "text_key": "prompt"}}]
    assert kept(run(spoken(), "data_juicer", operators=filters)) == [0]


@pytest.mark.usefixtures("juicer")
def test_numbers_of_data_juicer_shape_rewards(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("project_name: x\nprocess:\n  - text_length_filter:\n")
    shaping = {"reward_shaping_configs": [{"stats_key": "text_len"}]}
    chain = pipeline(
        ("data_juicer", {"config_path": str(tmp_path / "recipe.yaml")}), ("reward_shaping_mapper", shaping)
    )
    done = chain.run(spoken())
    assert [draft.reward for draft in done.drafts] == [4, 13, 2]
    assert done.metrics[f"{KEY}/data_juicer/text_len"] == pytest.approx(19 / 3)


@pytest.mark.usefixtures("juicer")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            {"operators": [{"clean_links_mapper": None}]},
            "clean_links_mapper is no filter; tokens are trained as sampled",
        ),
        ({"operators": [{"no_such_filter": {}}]}, "data_juicer: KeyError: 'no_such_filter'"),
        ({"operators": [{"text_length_filter": {"x": 1}}]}, "TypeError"),
        ({"config_path": "/no/such/recipe.yaml"}, "FileNotFoundError"),
    ],
)
def test_what_data_juicer_cannot_do_is_said_at_the_start(args: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        pipeline(("data_juicer", args))
    assert refused.value.field == f"{PLACE}.0.args"
    assert said in str(refused.value)


def test_without_data_juicer_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "data_juicer", None)
    with pytest.raises(InvalidInput, match=r"install it with: \.venv/bin/pip install py-data-juicer"):
        pipeline(("data_juicer", {"operators": [{"text_length_filter": {}}]}))
