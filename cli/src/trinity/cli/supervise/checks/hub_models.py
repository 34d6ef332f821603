"""Fetches models of the hub before services start, so that the screen names a hub that sends next to nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

from trinity.config import Plan
from trinity.config.memory import model_folder
from trinity.runtime import files, hub
from trinity.weights.checkpoints import INDEX, SINGLE


def fetch_models(plan: Plan) -> None:
    """Fills the hub's cache with the models that this machine loads. Raises Unavailable if a download stalls."""
    for name in _hub_names(plan):
        found = model_folder(name)
        if not _is_whole(found):
            from huggingface_hub import constants

            place = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
            hub.fetch_model(name, f"the hub at {constants.ENDPOINT}", place)


def _hub_names(plan: Plan) -> Iterator[str]:
    model, explorer = plan.config.model, plan.config.explorer
    served = [one.model_path for one in explorer.auxiliary_models if one.external_model is None]
    for name in dict.fromkeys(filter(None, [model.model_path, model.critic_model_path, *served])):
        if (
            not os.path.exists(Path(name).expanduser())
            and name.count("/") == 1
            and not name.startswith((".", "~", "/"))
        ):
            yield name


def _is_whole(folder: Path) -> bool:
    index = files.read_json(folder / INDEX)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    names = set(shards.values()) if isinstance(shards, dict) else {SINGLE}
    return all((folder / str(name)).is_file() for name in names)
