"""`trinity check --deep` decodes the images of tasksets, and refuses what does not go with a model that reads them."""

import json
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from support.fakes.data.vision import make_files, picture, pretend_torchvision
from support.fakes.models.tokenizer_folder import make_tokenizer_folder
from trinity.cli.main import app

pytestmark = pytest.mark.core


def check(
    folder: Path, image: Any, column: str = "image", urls: Sequence[str] = (), **sections: Any
) -> tuple[int, str]:
    """Exit code and output for a dataset whose third row has this image; `column`: image_key, `urls`: image_urls."""
    if not (folder / "model").exists():
        make_files(make_tokenizer_folder(folder / "model"))
    (folder / "good.png").write_bytes(picture())
    images = ["good.png", "good.png", image]
    rows: list[dict[str, Any]] = [{"prompt": "how many?", "response": "1", "image": found} for found in images]
    if column == "prompt":
        for row in rows:
            row["prompt"] = [{"role": "user", "content": [row["image"], {"type": "text", "text": "how many?"}]}]
            row["prompt"][0]["content"][0] = {"type": "image", "image": row.pop("image")}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {"path": str(folder / "rows.jsonl"), "format": {"image_key": column, "image_urls": list(urls)},
               "default_workflow_type": "simple_mm_workflow"}  # fmt: skip
    config: dict[str, Any] = {
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": model_of(folder),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 1, "explorer_input": {"taskset": taskset}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({**config, **sections}))
    done = CliRunner().invoke(app, ["check", "--deep", str(folder / "run.yaml")])
    return done.exit_code, " ".join(done.output.split())


def model_of(folder: Path, **others: Any) -> dict[str, Any]:
    """The section `model`."""
    model = {"model_path": str(folder / "model"), "custom_chat_template": "?", "max_prompt_tokens": 20}
    return {**model, "max_response_tokens": 4, **others}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision is no requirement of these tests."""
    pretend_torchvision(monkeypatch)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("gone.png", "taskset.format.image_key: row 2: 'image': "),
        ("text.png", "row 2: 'image': text.png: image: is no image that Pillow reads"),
        ("big.png", "row 2: 'image': big.png takes 64 tokens, model.max_prompt_tokens is 20"),
        ("deep.png", "row 2: 'image': deep.png: image: has Pillow's mode 'I;16'"),
    ],
)
def test_an_image_that_no_task_can_have_is_named(image: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "big.png").write_bytes(picture(64, 64))
    (tmp_path / "deep.png").write_bytes(picture(mode="I;16"))
    code, output = check(tmp_path, image)
    assert code == 2
    assert said in output


@pytest.mark.parametrize("column", ["image", "prompt"])
def test_good_images_pass_and_so_does_the_model(column: str, tmp_path: Path) -> None:
    code, output = check(tmp_path, "good.png", column)
    assert code == 0, output


def test_an_image_behind_a_url_that_the_yaml_lists_is_fetched_and_decoded(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}/"
    (tmp_path / "big.png").write_bytes(picture(64, 64))
    try:
        assert check(tmp_path, here + "good.png", urls=[here])[0] == 0
        for name, urls, said in (
            ("good.png", [], "URLs are not fetched. List its beginning in format.image_urls"),
            ("gone.png", [here], "gone.png; is answered with 404 File not found"),
            ("big.png", [here], "big.png takes 64 tokens, model.max_prompt_tokens is 20"),
        ):
            code, output = check(tmp_path, here + name, urls=urls)
            assert code == 2
            assert "taskset.format.image_key: row 2: 'image'" in output
            assert said in output
    finally:
        server.shutdown()
        server.server_close()


def test_an_image_of_a_message_is_named(tmp_path: Path) -> None:
    code, output = check(tmp_path, "gone.png", "prompt")
    assert code == 2
    assert "taskset.format.image_key: row 2: 'prompt': " in output


def test_a_model_that_reads_no_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen2"}')
    code, output = check(tmp_path, "good.png")
    assert code == 2
    assert "taskset.format.image_key: is given, and the model" in output
    for kind in ("llava", "gemma3"):
        (tmp_path / "model/config.json").write_text(json.dumps({"model_type": kind, "vision_config": {}}))
        why = ", since the tokens of an image attend to each other" if kind == "gemma3" else ""
        said = f"and a model of type '{kind}' trains on text only{why}; images are supported for qwen2_5_vl, "
        for wanted in (None, True):
            code, output = check(tmp_path, "good.png", model=model_of(tmp_path, images=wanted))
            assert code == 2
            assert f"taskset.format.image_key: is given, {said}" in output
            assert (f"model.images: is true, {said}" in output) == (wanted is True)


def test_a_model_that_reads_images_when_told_so_names_the_key(tmp_path: Path) -> None:
    make_files(make_tokenizer_folder(tmp_path / "model"), "qwen3_5")
    code, output = check(tmp_path, "good.png")
    assert code == 2
    assert "image_key: is given, and a model of type 'qwen3_5' reads images if model.images is true; mend" in output
    code, output = check(tmp_path, "good.png", model=model_of(tmp_path, images=True))
    assert code == 0, output


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (r"model\.language_model\.layers.*|model\.visual\.blocks.*", ""),
        (["q_proj", "visual.blocks.0.attn.qkv"], ""),
        (["qkv"], "target_modules: has 'qkv', a name of layers in the vision tower only"),
    ],
)
def test_layers_to_adapt_have_the_models_names_whatever_its_files_say(
    targets: str | list[str], said: str, tmp_path: Path
) -> None:
    """Files of Qwen2.5-VL lack a part of the names."""
    make_files(make_tokenizer_folder(tmp_path / "model"))
    names = ["model.layers.0.self_attn.q_proj", "visual.blocks.0.attn.qkv"]
    save_file({f"{name}.weight": torch.zeros(2, 2) for name in names}, tmp_path / "model/model.safetensors")
    model = model_of(tmp_path, lora_configs=[{"target_modules": targets}])
    code, output = check(tmp_path, "good.png", model=model)
    assert (code, said in output) == (2 if said else 0, True), output
