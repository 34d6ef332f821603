"""GPUs as nvidia-smi and CUDA_VISIBLE_DEVICES show them, and the device that a service takes."""

from pathlib import Path

import pytest

from trinity.runtime import devices
from trinity.runtime.devices import Gpu, TorchBuild, detect_gpus, mismatch, torch_build, visible, visible_gpus
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

CUDA_13 = TorchBuild("2.11.0+cu130", "13.0")
LISTING = """0, GPU-aaaa1111, NVIDIA H200, 143771, 143155, 580.65.06
1, GPU-bbbb2222, NVIDIA H200, 143771, 100, 580.65.06
"""


def gpus(count: int, driver: str = "580.65.06") -> list[Gpu]:
    return [Gpu(str(index), "NVIDIA Some", 140.0, 140.0, driver) for index in range(count)]


def test_cuda_visible_devices_says_which_and_in_what_order() -> None:
    both = visible(LISTING, None)
    assert [(gpu.index, gpu.name, gpu.driver) for gpu in both] == [("0", "NVIDIA H200", "580.65.06"),
                                                                   ("1", "NVIDIA H200", "580.65.06")]  # fmt: skip
    assert both[1].total_gib == pytest.approx(140.4, abs=0.1)
    assert both[1].free_gib < 0.1
    assert [gpu.index for gpu in visible(LISTING, "1,0")] == ["1", "0"]
    assert [gpu.index for gpu in visible(LISTING, "GPU-bbbb")] == ["1"]
    assert [gpu.index for gpu in visible(LISTING, "0,0,GPU-aaaa")] == ["0"]
    assert visible(LISTING, "") == visible(LISTING, "-1") == []


def test_a_card_that_does_not_say_its_memory_is_left_out() -> None:
    assert visible("0, GPU-a, Orin, [N/A], [N/A], 540.4\n", None) == []


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_gpus() == []


def test_the_drivers_tool_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{LISTING}'\n".replace("\n0", "0", 1))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert [gpu.index for gpu in detect_gpus({})] == ["0", "1"]
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    assert detect_gpus({}) == []


def test_the_installed_torch_is_read_without_its_import() -> None:
    import torch

    build = torch_build()
    assert build is not None
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda or "")


@pytest.mark.parametrize(
    ("driver", "torch", "said"),
    [
        ("580.65", CUDA_13, ""),
        ("610.1", CUDA_13, ""),
        ("550.54.15", CUDA_13, "built for CUDA 13.0, which needs driver 580 or newer, and this machine has 2 GPU(s) "
                               "(NVIDIA Some, driver 550.54.15); install a newer driver, a build of torch for CUDA 12"),
        ("550.54.15", TorchBuild("2.6.0", "12.4"), ""),
        ("580.65", TorchBuild("2.13.0+cpu", ""), "torch 2.13.0+cpu is built without CUDA, and this machine has 2 GPU"),
        ("580.65", None, ""),
    ],
)  # fmt: skip
def test_a_torch_that_cannot_use_the_driver_is_found(driver: str, torch: TorchBuild | None, said: str) -> None:
    why = mismatch(gpus(2, driver=driver), torch)
    assert said in why if said else why == ""


def test_gpus_that_torch_cannot_use_are_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    field, two = "TRINITY_TRAINER_DEVICE", gpus(2)
    for asked, available, cards, torch, chosen in (
        ("auto", True, two, CUDA_13, "cuda"),
        ("auto", False, [], CUDA_13, "cpu"),
        ("cpu", True, two, CUDA_13, "cpu"),
        ("cuda", False, [], CUDA_13, "this machine shows no GPU"),
        ("auto", False, two, TorchBuild("2.13.0+cpu", ""), "is built without CUDA"),
        ("auto", False, two, CUDA_13, "torch finds none of the 2 GPU(s) that nvidia-smi lists"),
    ):
        monkeypatch.setattr(devices, "detect_gpus", lambda cards=cards: cards)
        monkeypatch.setattr(devices, "torch_build", lambda torch=torch: torch)
        if chosen in ("cpu", "cuda"):
            assert devices.choose(asked, field, available) == chosen
            continue
        with pytest.raises(InvalidInput, match=f"^{field}: is {asked}, but ") as refused:
            devices.choose(asked, field, available)
        assert chosen in str(refused.value)
        assert str(refused.value).endswith(f"or set {field}=cpu")


@pytest.mark.parametrize(("value", "cards"), [("", []), ("-1", []), ("2", ["2"]), (" 3, 1 ,3", ["3", "1"])])
def test_cuda_visible_devices_is_respected(monkeypatch: pytest.MonkeyPatch, value: str, cards: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == cards
