"""Samples the use of this machine's GPUs, as NVIDIA's driver measures it: the share of time in which kernels run.

It calls the driver's library (https://docs.nvidia.com/deploy/nvml-api), which every machine with the driver has.
"""

import ctypes
import threading
from collections import defaultdict
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_PERIOD_SECONDS = 1.0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent of the last period of the driver


class GpuUse:
    """Reads the use of all GPUs of this machine once a second, whichever CUDA_VISIBLE_DEVICES names.

    `take` returns the means since its last call. A GPU that tells no use, such as one with MIG, is left out; without a
    driver there is none.
    """

    def __init__(self, library: Any = None, period_seconds: float = _PERIOD_SECONDS) -> None:
        self._nvml = library if library is not None else _loaded()
        self._period_seconds = period_seconds
        self._lock = threading.Lock()
        self._samples: dict[int, list[int]] = defaultdict(list)
        self._closed = threading.Event()
        if self._nvml is not None:
            threading.Thread(target=self._run, name="gpu-use", daemon=True).start()

    def take(self) -> dict[int, float]:
        """Returns the mean use, 0 to 1, by the GPU's index in nvidia-smi."""
        with self._lock:
            samples, self._samples = self._samples, defaultdict(list)
        return {index: sum(values) / len(values) / 100 for index, values in sorted(samples.items())}

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        handles = _handles(self._nvml)
        while handles and not self._closed.is_set():
            for index, handle in handles.items():
                use = _Utilization()
                if self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0:
                    with self._lock:
                        self._samples[index].append(use.gpu)
            self._closed.wait(self._period_seconds)


def _loaded() -> Any:
    """Returns the driver's library after its start; None on a machine without it."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _handles(nvml: Any) -> dict[int, ctypes.c_void_p]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return {}
    found = {}
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            found[index] = handle
    return found
