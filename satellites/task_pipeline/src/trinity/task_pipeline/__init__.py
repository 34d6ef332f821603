"""data_processor.task_pipeline: filters, scores and orders rows of local tasksets before a run starts.

read -> operators, in their order -> scores -> order by weighted sum -> top_k -> one file for each taskset

The run reads this file in place of the taskset's input. It is made once, together with a manifest; a restart reuses it.

    result = run_pipeline(config, make_plan(config).job_dir)   # empty without data_processor.task_pipeline
    config = with_outputs(config, result)

Rows are plain mappings and not a `datasets.Dataset`, because a row that stays must not change. Arrow gives all rows the
same columns, fills the fields of nested objects with null, and refuses columns of mixed types and integers beyond
int64. `datasets` also takes 0.8 s to import, and filters 20,000 rows in 30 ms plus 180 ms of conversion; ours take
12 ms. Scores and duplicates need all rows at once in any case.

docs/task_pipeline.md has the operators, the scores and their formulas. Importing this package loads no numpy.
"""

from trinity.task_pipeline.checks import check_task_pipeline
from trinity.task_pipeline.names import operator_args
from trinity.task_pipeline.run import (
    PipelineStep,
    ProcessedTaskset,
    TaskPipelineResult,
    describe,
    previewed,
    run_pipeline,
    run_stages,
    with_outputs,
)

__all__ = [
    "PipelineStep",
    "ProcessedTaskset",
    "TaskPipelineResult",
    "check_task_pipeline",
    "describe",
    "operator_args",
    "previewed",
    "run_pipeline",
    "run_stages",
    "with_outputs",
]
