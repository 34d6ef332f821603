"""Text filters of Data-Juicer (py-data-juicer 1.1 or newer), on what experiences say."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trinity.buffer.operators.base import Draft
from trinity.data.experience import Task
from trinity.runtime.errors import InvalidInput


class DataJuicer:
    """Drops what one of Data-Juicer's filters would: `operators` as in its recipes, or the recipe at `config_path`.

    Columns are `text` and `response`, the response, `prompt` and `query`, the prompt; `text_key` of a filter names one.
    Numbers that filters find become metrics of the experience, for operators that follow. Raises InvalidInput for what
    is no filter, and without the package.
    """

    drops = "texts that the filters refuse"

    def __init__(self, operators: Sequence[Mapping[str, Any]] = (), config_path: str = "") -> None:
        try:
            from data_juicer.ops import load_ops
            from data_juicer.utils.constant import Fields
        except ImportError as error:
            install = "install it with: .venv/bin/pip install py-data-juicer"
            raise InvalidInput("data_juicer", f"needs the package py-data-juicer ({error}); {install}") from error
        if not operators:
            operators = yaml.safe_load(Path(config_path).expanduser().read_text())["process"]
        self._stats = Fields.stats
        self._filters = load_ops([{name: args or {} for name, args in operator.items()} for operator in operators])
        for operator, found in zip(operators, self._filters, strict=True):
            if not hasattr(found, "compute_stats_batched"):
                raise InvalidInput("operators", f"{next(iter(operator))} is no filter; tokens are trained as sampled")

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        prompts = [draft.experience.prompt_text for draft in drafts]
        responses = [draft.experience.response_text for draft in drafts]
        columns: dict[str, list[Any]] = {"text": responses, "response": responses, "prompt": prompts, "query": prompts}
        means: dict[str, float] = {}
        for one in self._filters:
            columns[self._stats] = [{} for _ in drafts]  # fresh: a filter skips what it finds, also of another column
            columns = one.compute_stats_batched(columns)
            numbers: dict[str, list[float]] = {}
            for draft, stats, keep in zip(drafts, columns[self._stats], one.process_batched(columns), strict=True):
                if not keep:
                    draft.drop()
                for name, value in stats.items():
                    if isinstance(value, int | float):
                        draft.metrics[name] = float(value)
                        numbers.setdefault(name, []).append(float(value))
            means |= {name: statistics.fmean(values) for name, values in numbers.items()}
        return means
