"""Vision-language models in the trainer have log-probabilities and gradients of transformers, packed and padded."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageTextToText

from support.fakes.data.experience import make_group, make_task
from support.fakes.data.vision import ASKED, KINDS, make_model, picture
from support.programs.trainer.training import make_model as make_text_model
from trinity.api.buffer.v1 import buffer_pb2
from trinity.config.algorithms import resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.data import images
from trinity.data.wire import encode_outcome
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data import images as read_images
from trinity.trainer.data.batch import TrainSequence, from_groups
from trinity.trainer.data.images import ImageReader, Seen
from trinity.trainer.data.microbatch import collate
from trinity.trainer.engine.critic import load_critic
from trinity.trainer.model.checkpointing import recompute_activations
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.trainer.model.vision import freeze_all_but_text
from trinity.weights.lora import merged

RESPONSE = [5, 6, 7, 9, 3]
PICTURES = [picture(colour="red"), picture(64, 24, colour="white"), picture(9, 40, colour="blue")]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(kind, marks=pytest.mark.core) for kind in KINDS),
        *(pytest.param(kind, marks=pytest.mark.extended) for kind in ASKED),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights ten times as large as a new model's: what an image adds is not small beside the text."""
    found = make_model(tmp_path_factory.mktemp("vision") / "model", request.param)
    weights = load_file(found / "model.safetensors")
    for name, tensor in weights.items():
        if "visual" in name and tensor.ndim > 1:
            tensor.mul_(10)
    save_file(weights, found / "model.safetensors", {"format": "pt"})
    return found


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImageReader:
    found = ImageReader.of(ModelConfig(model_path=str(folder), images=True))
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
        placed = images.placed(prompt, shown, reader.rules)
        made.append(TrainSequence(tokens, len(prompt), nothing, mask, 0, images=placed))
    return made


def inputs(folder: Path, reader: ImageReader) -> Iterator[tuple[TrainSequence, dict[str, torch.Tensor]]]:
    """Each sequence, and what transformers' model takes of it."""
    processor = AutoImageProcessor.from_pretrained(folder)
    for sequence in sequences(reader):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        seen = {"input_ids": ids}
        if sequence.images:
            seen |= processor(images=[images.rgb(image.file) for image in sequence.images], return_tensors="pt")
            seen["mm_token_type_ids"] = (ids == reader.rules.token).int()
        yield sequence, seen


def of_transformers(folder: Path, reader: ImageReader) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Log-probabilities of each sequence alone, and the gradient of their sum."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    found = []
    for sequence, seen in inputs(folder, reader):
        logs = model(**seen).logits[0].log_softmax(-1)
        places = range(sequence.prompt_length - 1, sequence.length - 1)
        chosen = torch.stack([logs[at, int(sequence.token_ids[at + 1])] for at in places])
        chosen.sum().backward()
        found.append(chosen.detach().numpy())
    return np.stack(found), {name: parameter.grad for name, parameter in model.named_parameters()}


def policy_of(folder: Path, packed: bool) -> PolicyModel:
    policy = load_policy(ModelConfig(model_path=str(folder), images=True), torch.float32, 64, packed=packed)
    assert policy.packed == packed
    return policy


@pytest.mark.parametrize("packed", [True, False])
def test_log_probabilities_and_gradients_are_those_of_transformers(
    folder: Path, reader: ImageReader, packed: bool
) -> None:
    policy = policy_of(folder, packed)
    found, _ = policy(collate(sequences(reader), 0, packed, reader))
    expected, gradients = of_transformers(folder, reader)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)
    found.sum().backward()
    for name, parameter in policy.weights():
        # Key biases have no gradient but rounding: they move all scores of a query alike.
        largest = max(float(gradients[name].abs().max()), 1e-2)
        close = 1e-4 if "linear_attn" in name else 1e-5  # a delta network's gates are exponents of sums
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=close * largest, msg=name)


def test_parts_of_a_micro_batch_have_the_images_that_stand_in_them(reader: ImageReader) -> None:
    """Also of an image that is cut."""
    whole = collate(sequences(reader), 0, True, reader)
    assert whole.seen is not None
    assert len(whole.seen.grids) == len(PICTURES), "each picture is there once, for all who show it"
    whole = replace(whole, seen=replace(whole.seen, pixels=torch.rand(whole.seen.pixels.shape)))

    def shown(seen: Seen) -> torch.Tensor:
        """A feature for each place."""
        return seen.pixels.unflatten(0, (-1, reader.rules.merge**2)).mean(1)[seen.rows]

    for parts in (1, 2, 3, 7):
        cut = [(index, part) for index in range(parts) if (part := whole.part(index, parts)).seen is not None]
        seen = [(index * part.input_ids.shape[1], part.seen) for index, part in cut if part.seen is not None]
        assert torch.equal(torch.cat([part.places + start for start, part in seen]), whole.seen.places)
        torch.testing.assert_close(torch.cat([shown(part) for _, part in seen]), shown(whole.seen))
        assert parts < 7 or any(len(part.grids) < len(whole.seen.grids) for _, part in seen)


def test_processed_images_are_kept_up_to_so_many_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImageReader.of(ModelConfig(model_path=str(folder), images=True))
    assert reader is not None
    first, second, third, small = (images.PlacedImage(0, file) for file in [*PICTURES, picture(8, 8)])
    sizes = [reader._one(image)[0].nbytes for image in (first, second, third)]
    monkeypatch.setattr(read_images, "_KEPT_BYTES", sizes[0] + sizes[2])
    reader._one(first)
    reader._one(small)
    assert list(reader._kept) == [first.digest, small.digest], "what was used last stays"
    assert reader._kept_bytes == sum(values.nbytes for values, _ in reader._kept.values())
    monkeypatch.setattr(read_images, "_KEPT_BYTES", 1)
    reader._one(second)
    assert list(reader._kept) == [second.digest], "the newest is kept in any case"


def test_pictures_count(folder: Path, reader: ImageReader) -> None:
    """Each of a tower's weights moves the log-probabilities by far more than the tolerance."""
    policy, micro = policy_of(folder, packed=True), collate(sequences(reader), 0, True, reader)
    torch.manual_seed(0)
    with torch.no_grad():
        before, _ = policy(micro)
        for name, parameter in policy.weights():
            if "visual" in name and parameter.ndim > 1:
                kept = parameter.clone()
                parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.std())
                assert float((policy(micro)[0] - before).abs().max()) > 1e-4, name
                parameter.copy_(kept)


def test_positions_are_those_of_transformers(folder: Path, reader: ImageReader) -> None:
    """An image of a later turn too, with tokens before it and behind it that the policy sampled with the same id."""
    model = AutoModelForImageTextToText.from_pretrained(folder).model
    token = reader.rules.token
    told = images.expanded([2, token, 3], PICTURES[1:2], reader.rules)
    later = (images.placed(told, PICTURES[1:2], reader.rules)[0].moved(4),)
    nothing = np.zeros(1, np.float32)
    tokens = np.array([1, token, token, 9, *told, 4, token, 6], np.int32)
    turns = TrainSequence(tokens, len(tokens) - 1, nothing, nothing.astype(bool), 0, images=later)
    for sequence in (*sequences(reader)[1:], turns):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        grids = torch.tensor([reader.rules.grid(*images.size(image.file)) for image in sequence.images])
        kinds = torch.zeros_like(ids, dtype=torch.int)
        for image in sequence.images:
            kinds[0, image.start : image.start + reader.rules.tokens(*images.size(image.file))] = 1
        expected, _ = model.get_rope_index(ids, kinds, image_grid_thw=grids)
        np.testing.assert_array_equal(reader.positions(sequence), expected[:, 0].numpy())


@pytest.mark.parametrize("recomputed", [False, True])
def test_every_weight_learns_unless_the_tower_is_frozen(folder: Path, reader: ImageReader, recomputed: bool) -> None:
    for frozen in (False, True):
        policy = policy_of(folder, packed=True).train()
        recompute_activations(policy.model, recomputed)
        if frozen:
            freeze_all_but_text(policy.model)
        for shown in (sequences(reader), sequences(reader)[:1]):
            policy.zero_grad()
            policy(collate(shown, 0, True, reader))[0].sum().backward()
            has = {name: parameter.grad is not None for name, parameter in policy.weights()}
            assert all(has.values()) != frozen
            assert not frozen or {name for name, found in has.items() if not found} == {
                name for name in has if name.startswith("model.visual.")
            }


@pytest.mark.parametrize(
    ("targets", "in_tower"),
    [("all-linear", False), (["up_proj"], False), (r".*(visual\.merger.*|[qv]_proj)", True)],
)
def test_adapters_are_merged_with_the_models_files(
    folder: Path, reader: ImageReader, targets: str | list[str], in_tower: bool, tmp_path: Path
) -> None:
    """The tower has adapters where it is named. What explorers merge computes what the trainer's model computes."""
    lora = LoraConfig(lora_rank=3, lora_alpha=6, target_modules=targets)
    config = ModelConfig(model_path=str(folder), images=True, lora_configs=[lora])
    policy = load_policy(config, torch.float32, 64, packed=True)
    assert policy.lora is not None
    adapted = [target.name for target in policy.lora.targets]
    assert any(".language_model." in name for name in adapted)
    assert any(".visual." in name for name in adapted) == in_tower
    torch.manual_seed(1)
    for _, parameter in policy.weights():
        parameter.data.normal_(std=0.1)
    shown = collate(sequences(reader), 0, True, reader)
    with torch.no_grad():
        found, plain = policy(shown)[0], policy_of(folder, packed=True)(shown)[0]
    assert float((found - plain).abs().max()) > 1e-2
    base = load_file(folder / "model.safetensors")
    policy.lora.check_base({name: tuple(tensor.shape) for name, tensor in base.items()})
    adapters = {name: parameter.detach() for name, parameter in policy.weights()}
    whole = dict(merged(base.items(), adapters, policy.lora, "cpu"))
    shutil.copytree(folder, tmp_path / "merged")
    save_file(whole, tmp_path / "merged/model.safetensors", {"format": "pt"})
    with torch.no_grad():
        expected, _ = policy_of(tmp_path / "merged", packed=True)(shown)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_a_critic_values_what_transformers_body_says(folder: Path, reader: ImageReader, packed: bool) -> None:
    critic = load_critic(ModelConfig(model_path=str(folder), images=True), torch.float32, packed=packed)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    found = critic(collate(sequences(reader), 0, packed, reader))
    found.sum().backward()
    assert all(weight.grad is not None for weight in critic.parameters())
    body = AutoModel.from_pretrained(folder, dtype=torch.float32)
    for row, (sequence, seen) in zip(found.detach(), inputs(folder, reader), strict=True):
        with torch.no_grad():
            states = body(**seen)[0][0, sequence.prompt_length - 1 : -1]
        np.testing.assert_allclose(row.numpy(), (states @ critic.head.weight[0]).detach().numpy(), atol=1e-4)


def test_a_critic_that_reads_no_images_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_text_model(tmp_path / "other")
    for policy, critic in ((folder, other), (other, folder)):
        config = ModelConfig(model_path=str(policy), critic_model_path=str(critic), images=True)
        with pytest.raises(InvalidInput, match=r"critic_model_path: .* reads images otherwise than model.model_path"):
            load_critic(config, torch.float32)


@pytest.mark.core
def test_sequences_have_the_images_of_their_experiences() -> None:
    """Of the task or of the group."""
    group = make_group(make_task(images=tuple(PICTURES[:2]), repeat_times=2))
    shown = images.PlacedImage(1, PICTURES[2]), images.PlacedImage(40, PICTURES[0])
    first = replace(group.experiences[0], images=shown)
    group = replace(group, experiences=(first, group.experiences[1]))
    entry = buffer_pb2.LedgerEntry(step=1, groups=[buffer_pb2.LedgerGroup(task_id="t", num_experiences=2)])
    batch = from_groups(entry, [encode_outcome(group)], resolve(AlgorithmConfig()))
    assert [sequence.images for sequence in batch.sequences] == [shown, ()]
