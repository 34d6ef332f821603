"""Expert rows that join the groups of every batch (sample_strategy mix): a function of the step."""

from collections.abc import Sequence

from trinity.buffer.ledger.wire import AuxiliaryRow, Example
from trinity.config import Plan
from trinity.data.datasets import Row, read_buffer, reader
from trinity.data.selectors import make_selector


class Auxiliary:
    """The auxiliary buffer that the sample strategy names; none for other strategies."""

    def __init__(self, plan: Plan) -> None:
        self._per_step = plan.experts_per_step
        self._rows: Sequence[Row] = []
        if not self._per_step:
            return
        self._name = str(plan.algorithm.sample_strategy.args["sft_dataset_name"])
        config = plan.config.buffer.trainer_input.auxiliary_buffers[self._name]
        self._rows = read_buffer(config)
        self._selector = make_selector(config.data_selector, self._rows)
        self._read = reader("messages", config.format, self._rows[0])

    def rows(self, step: int) -> list[AuxiliaryRow]:
        """The expert rows of a step."""
        positions = range((step - 1) * self._per_step, step * self._per_step)
        return [AuxiliaryRow(self._name, self._selector.select(at)) for at in positions]

    def example(self, row: AuxiliaryRow) -> Example:
        return Example(row.row, row.buffer, **self._read(self._rows[row.row], row.row))
