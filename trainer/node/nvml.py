"""Use, memory and power of NVIDIA's GPUs, from the library that comes with the driver; no package is needed."""

from __future__ import annotations

import ctypes
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The GPUs that this process may see. :raises OSError: if there is no driver, or it does not work."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._nvml: Any = ctypes.CDLL(library)
        self._check(self._nvml.nvmlInit_v2())
        count = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        self._devices = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            self._check(self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
            self._devices.append(device)

    def sample(self) -> dict[str, float]:
        """Values by MLflow's names for them; what a GPU does not tell is left out."""
        found: dict[str, float] = {}
        for index, device in enumerate(self._devices):
            memory, use, power, limit = _Memory(), _Utilization(), ctypes.c_uint(), ctypes.c_uint()
            name = f"gpu_{index}"
            if self._told("nvmlDeviceGetUtilizationRates", device, use):
                found[f"{name}_utilization_percentage"] = float(use.gpu)
            if self._told("nvmlDeviceGetMemoryInfo", device, memory) and memory.total:
                found[f"{name}_memory_usage_megabytes"] = memory.used / 1e6
                found[f"{name}_memory_usage_percentage"] = 100 * memory.used / memory.total
            if self._told("nvmlDeviceGetPowerUsage", device, power):  # milliwatts
                found[f"{name}_power_usage_watts"] = power.value / 1000
                if self._told("nvmlDeviceGetEnforcedPowerLimit", device, limit) and limit.value:
                    found[f"{name}_power_usage_percentage"] = 100 * power.value / limit.value
        return found

    def _told(self, function: str, device: ctypes.c_void_p, answer: Any) -> bool:
        return int(getattr(self._nvml, function)(device, ctypes.byref(answer))) == 0

    def _check(self, code: int) -> None:
        if code:
            raise OSError(f"NVML answers {code}")
