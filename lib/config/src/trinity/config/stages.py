"""Stages: one Config each, in order."""

from trinity.config.schema import Config

SECTIONS = ("algorithm", "data_processor", "buffer", "explorer", "trainer")


def expand(config: Config) -> list[Config]:
    """One Config per stage, named `name/stage_name`; the config itself if it has no stages.

    A section given in a stage replaces the inherited one whole. Every stage saves its last model for the next one.
    """
    if not config.stages:
        return [config]
    stages = []
    for stage in config.stages:
        changes: dict[str, object] = {key: getattr(stage, key) for key in SECTIONS if getattr(stage, key) is not None}
        changes["mode"] = stage.mode or config.mode
        changes["name"] = f"{config.name}/{stage.stage_name}"
        trainer = stage.trainer or config.trainer
        changes["trainer"] = trainer.model_copy(update={"save_hf_checkpoint": "last"})
        stages.append(config.model_copy(update={**changes, "stages": []}))
    return stages
