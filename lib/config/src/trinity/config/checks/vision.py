"""Tasks with images: the keys they need, and the keys that exclude them."""

from collections.abc import Iterator

from trinity.config.errors import Problem
from trinity.config.schema import Config
from trinity.config.schema.buffer import TasksetConfig

WORKFLOW = "simple_mm_workflow"


def check_images(config: Config, tasksets: list[tuple[str, TasksetConfig]]) -> Iterator[Problem]:
    """`tasksets`: all of them, with their keys below buffer.explorer_input."""
    base = "buffer.explorer_input"
    for key, taskset in tasksets:
        if taskset.format.image_urls and taskset.format.image_key is None:
            what = "is given without image_key, the column of the images; add that, or remove it"
            yield Problem(f"{base}.{key}.format.image_urls", what)
    trained = [config.buffer.trainer_input.experience_buffer, *config.buffer.trainer_input.auxiliary_buffers.values()]
    formats = [buffer.format for buffer in trained if buffer is not None]
    if any(form.image_key or form.image_urls for form in formats):
        what = "has an image_key or image_urls; images are for tasksets, datasets are trained as text; remove it"
        yield Problem("buffer.trainer_input", what)
    for key, taskset in tasksets:
        workflow = config.buffer.explorer_input.workflow_of(taskset, key.startswith("eval"))
        if taskset.format.image_key is not None and workflow.removeprefix("async_") != WORKFLOW:
            what = f"is given, and {workflow} shows no images; use default_workflow_type: {WORKFLOW}"
            yield Problem(f"{base}.{key}.format.image_key", what)
        elif taskset.format.image_key is None and workflow.removeprefix("async_") == WORKFLOW:
            yield Problem(f"{base}.{key}.format.image_key", f"is missing; {WORKFLOW} needs the column of the images")


def archives(config: Config) -> list[str]:
    """Returns the keys that name an archive of experience."""
    pipeline, buffer = config.data_processor.experience_pipeline, config.buffer.trainer_input.experience_buffer
    given = (
        ("data_processor.experience_pipeline.input_save_path", pipeline.input_save_path),
        ("buffer.trainer_input.experience_buffer.path", buffer and buffer.path),
    )
    return [where for where, path in given if path]
