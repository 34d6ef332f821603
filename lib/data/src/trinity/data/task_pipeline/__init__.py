"""data_processor.task_pipeline: rows of local tasksets are filtered, scored and ordered before a run starts.

read -> operators, in their order -> scores -> order by weighted sum -> top_k -> one file for each taskset, which the
run then uses in place of its input. It is made once, with a manifest beside it; a restart reuses the file.

    result = run_pipeline(config, make_plan(config).job_dir)   # nothing without data_processor.task_pipeline
    config = with_outputs(config, result)

Rows are plain mappings and not a `datasets.Dataset`: Arrow gives all rows the same columns and a column one type, and a
row that stays must come out as it was. Scores and duplicates need all rows at once in any case.

docs/task_pipeline.md has the operators, the scores and their formulas. Importing this loads no numpy.
"""

from trinity.data.task_pipeline.checks import check_task_pipeline
from trinity.data.task_pipeline.names import operator_args
from trinity.data.task_pipeline.result import ProcessedTaskset, Step, TaskPipelineResult, describe
from trinity.data.task_pipeline.run import previewed, run_pipeline, run_stages, with_outputs

__all__ = [
    "ProcessedTaskset",
    "Step",
    "TaskPipelineResult",
    "check_task_pipeline",
    "describe",
    "operator_args",
    "previewed",
    "run_pipeline",
    "run_stages",
    "with_outputs",
]
