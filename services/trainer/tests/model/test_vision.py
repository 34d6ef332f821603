"""A vision-language model in the trainer has the log-probabilities of transformers, packed and padded."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from support.data.experience import make_group, make_task
from support.data.vision import make_model, picture
from trinity.api.buffer.v1 import buffer_pb2
from trinity.config.algorithms import resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.config.schema.model import ModelConfig
from trinity.data import images
from trinity.data.wire import encode_outcome
from trinity.trainer.data.batch import TrainSequence, from_groups
from trinity.trainer.data.images import ImageReader
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model.checkpointing import recompute_activations
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.trainer.model.vision import freeze_vision

pytestmark = pytest.mark.core

RESPONSE = [5, 6, 7, 9, 3]
PICTURES = [picture(colour="red"), picture(64, 24, colour="white"), picture(9, 40, colour="blue")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImageReader:
    found = ImageReader.of(ModelConfig(model_path=str(folder)))
    assert found is not None
    return found


def sequences(reader: ImageReader) -> list[TrainSequence]:
    """Of none to three images; the first has a placeholder token that was sampled."""
    made, nothing = [], np.zeros(len(RESPONSE), np.float32)
    for count in range(4):
        shown = PICTURES[:count]
        prompt = images.expanded([1, *[2, reader.rules.token, 3] * count, 8], shown, reader.rules)
        response = RESPONSE if count else [5, reader.rules.token, 7, 9, 3]
        tokens = np.array([*prompt, *response], np.int32)
        mask = np.ones(len(response), bool)
        made.append(TrainSequence(tokens, len(prompt), nothing, mask, 0, images=tuple(shown)))
    return made


def of_transformers(folder: Path, reader: ImageReader) -> np.ndarray:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = AutoImageProcessor.from_pretrained(folder)
    found = []
    for sequence in sequences(reader):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        seen = {}
        if sequence.images:
            seen = {**processor(images=[images.rgb(image) for image in sequence.images], return_tensors="pt"),
                    "mm_token_type_ids": (ids == reader.rules.token).int()}  # fmt: skip
        with torch.no_grad():
            logs = model(input_ids=ids, **seen).logits[0].log_softmax(-1)
        places = range(sequence.prompt_length - 1, sequence.length - 1)
        found.append([logs[at, int(sequence.token_ids[at + 1])].item() for at in places])
    return np.array(found, np.float32)


def policy_of(folder: Path, packed: bool) -> PolicyModel:
    policy = load_policy(ModelConfig(model_path=str(folder)), torch.float32, 64, packed=packed)
    assert policy.packed == packed
    return policy


@pytest.mark.parametrize("packed", [True, False])
def test_log_probabilities_are_those_of_transformers(folder: Path, reader: ImageReader, packed: bool) -> None:
    with torch.no_grad():
        found, _ = policy_of(folder, packed)(collate(sequences(reader), 0, packed, reader))
    np.testing.assert_allclose(found.numpy(), of_transformers(folder, reader), atol=1e-5)


def test_positions_are_those_of_transformers(folder: Path, reader: ImageReader) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder).model
    for sequence in sequences(reader)[1:]:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        grids = torch.tensor([reader.rules.grid(*images.size(image)) for image in sequence.images])
        expected, _ = model.get_rope_index(ids, (ids == reader.rules.token).int(), image_grid_thw=grids)
        np.testing.assert_array_equal(reader.positions(sequence), expected[:, 0].numpy())


@pytest.mark.parametrize("recomputed", [False, True])
def test_every_weight_learns_unless_the_tower_is_frozen(folder: Path, reader: ImageReader, recomputed: bool) -> None:
    for frozen in (False, True):
        policy = policy_of(folder, packed=True).train()
        recompute_activations(policy.model, recomputed)
        if frozen:
            freeze_vision(policy.model)
        for shown in (sequences(reader), sequences(reader)[:1]):
            policy.zero_grad()
            policy(collate(shown, 0, True, reader))[0].sum().backward()
            has = {name: parameter.grad is not None for name, parameter in policy.weights()}
            assert all(has.values()) != frozen
            assert not frozen or {name for name, found in has.items() if not found} == {
                name for name in has if name.startswith("model.visual.")
            }


def test_sequences_have_the_images_that_their_experiences_name() -> None:
    group = make_group(make_task(images=tuple(PICTURES), repeat_times=2))
    first = replace(group.experiences[0], images=(images.digest(PICTURES[2]), images.digest(PICTURES[0])))
    group = replace(group, experiences=(first, group.experiences[1]))
    entry = buffer_pb2.LedgerEntry(step=1, groups=[buffer_pb2.LedgerGroup(task_id="t", num_experiences=2)])
    batch = from_groups(entry, [encode_outcome(group)], resolve(AlgorithmConfig()))
    assert [sequence.images for sequence in batch.sequences] == [(PICTURES[2], PICTURES[0]), ()]
