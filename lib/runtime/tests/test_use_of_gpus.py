"""The use of GPUs is sampled through the functions of NVIDIA's driver library, of which this has a stand-in."""

import time
from typing import Any

import pytest

from trinity.runtime.gpu_use import GpuUse

pytestmark = pytest.mark.core

_NOT_SUPPORTED = 3


class Driver:
    """The three calls that the sampler makes. `uses`: percent of each GPU; None for one that tells no use."""

    def __init__(self, *uses: int | None, broken: bool = False) -> None:
        self.uses, self.broken, self.reads = list(uses), broken, 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.uses)
        return 999 if self.broken else 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 1000 + index.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, use: Any) -> int:
        self.reads += 1
        value = self.uses[handle.value - 1000]
        if value is None:
            return _NOT_SUPPORTED
        use._obj.gpu, use._obj.memory = value, 1
        return 0


def _after(driver: Driver, reads: int) -> None:
    end, wanted = time.monotonic() + 10, driver.reads + reads
    while driver.reads < wanted:
        assert time.monotonic() < end, "the sampler reads nothing"
        time.sleep(0.001)


def test_the_mean_since_the_last_call_is_told_of_each_gpu() -> None:
    driver = Driver(80, None, 7)
    use = GpuUse(driver, 0.001)
    _after(driver, 6)
    assert use.take() == {0: pytest.approx(0.8), 2: pytest.approx(0.07)}
    driver.uses[0] = 20
    _after(driver, 6)  # one round may have begun with the old value
    use.take()
    _after(driver, 6)
    assert use.take()[0] == pytest.approx(0.2)
    use.close()
    time.sleep(0.05)
    reads = driver.reads
    time.sleep(0.05)
    assert driver.reads == reads


def test_nothing_is_told_where_the_driver_fails_or_has_no_gpu() -> None:
    for driver in (Driver(50, broken=True), Driver()):
        use = GpuUse(driver, 0.001)
        time.sleep(0.02)
        assert use.take() == {}
        assert driver.reads == 0


def test_nothing_is_told_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.runtime.gpu_use._LIBRARY", "libof-no-driver.so.9")
    assert GpuUse().take() == {}
