"""Use, memory, power, pace and health of NVIDIA's GPUs, from the library that comes with the driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


_UNCORRECTED, _SINCE_LOAD = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
_READ: Final = 0  # nvmlGpuP2PCapsIndex_t
_TEMPERATURE, _SM = 0, 1  # nvmlTemperatureSensors_t, nvmlClockType_t
# Hardware, heat by software and hardware, power brake. The software's power cap (0x4) is how a busy GPU runs.
_SLOWED: Final = 0x8 | 0x20 | 0x40 | 0x80
_MOST_LINKS: Final = 36


@dataclass(frozen=True)
class Health:
    """What a GPU tells of itself; None where it does not.

    :param ecc: memory errors since the driver was loaded that could not be corrected.
    :param pending: rows of memory wait for a reset to be replaced. :param failed: they could not be replaced.
    :param nvlinks: those that are up. :param peers: whether it reaches each GPU of the node directly; None for itself.
    """

    name: str
    memory: int | None
    ecc: int | None
    pending: bool | None
    failed: bool | None
    nvlinks: int
    peers: tuple[bool | None, ...]


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
            found |= {f"{name}_{key}": value for key, value in self._pace(device).items()}
        return found

    def _pace(self, device: ctypes.c_void_p) -> dict[str, float]:
        """How fast and how hot a GPU is, and whether the driver says that it was slowed: 100 or 0, for a mean."""
        clock, heat, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        found: dict[str, float] = {}
        if self._call("nvmlDeviceGetClockInfo", device, ctypes.c_int(_SM), ctypes.byref(clock)):
            found["clock_megahertz"] = float(clock.value)
        if self._call("nvmlDeviceGetTemperature", device, ctypes.c_int(_TEMPERATURE), ctypes.byref(heat)):
            found["temperature_celsius"] = float(heat.value)
        # Newer drivers call it events and keep the old name as well.
        if self._call("nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.byref(reasons)):
            found["throttled_percentage"] = 100.0 if reasons.value & _SLOWED else 0.0
        return found

    def health(self) -> list[Health]:
        """What each GPU tells of itself, by index."""
        return [self._health(device) for device in self._devices]

    def driver(self) -> tuple[str, int | None]:
        """The driver's version, and the newest CUDA that it can run, as 12040 for 12.4."""
        text, version = ctypes.create_string_buffer(96), ctypes.c_int()
        named = self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(96))
        runs = self._call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        return (text.value.decode(errors="replace") if named else "unknown"), (version.value if runs else None)

    def _health(self, device: ctypes.c_void_p) -> Health:
        text, memory, errors = ctypes.create_string_buffer(96), _Memory(), ctypes.c_ulonglong()
        named = self._call("nvmlDeviceGetName", device, text, ctypes.c_uint(96))
        kind = ctypes.c_int(_UNCORRECTED), ctypes.c_int(_SINCE_LOAD)
        counted = self._call("nvmlDeviceGetTotalEccErrors", device, *kind, ctypes.byref(errors))
        rows = [ctypes.c_uint() for _ in range(4)]
        mapped = self._call("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, rows))
        up = 0
        for link in range(_MOST_LINKS):
            active = ctypes.c_int()
            if not self._call("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(link), ctypes.byref(active)):
                break
            up += bool(active.value)
        return Health(
            name=text.value.decode(errors="replace") if named else "GPU",
            memory=memory.total if self._told("nvmlDeviceGetMemoryInfo", device, memory) else None,
            ecc=errors.value if counted else None,
            pending=bool(rows[2].value) if mapped else None,
            failed=bool(rows[3].value) if mapped else None,
            nvlinks=up,
            peers=tuple(None if other is device else self._reaches(device, other) for other in self._devices),
        )

    def _reaches(self, device: ctypes.c_void_p, other: ctypes.c_void_p) -> bool | None:
        status = ctypes.c_int()
        asked = self._call("nvmlDeviceGetP2PStatus", device, other, ctypes.c_int(_READ), ctypes.byref(status))
        return status.value == 0 if asked else None

    def _call(self, function: str, *arguments: Any) -> bool:
        """Whether the driver has answered; older ones lack some functions."""
        found = getattr(self._nvml, function, None)
        return found is not None and int(found(*arguments)) == 0

    def _told(self, function: str, device: ctypes.c_void_p, answer: Any) -> bool:
        return int(getattr(self._nvml, function)(device, ctypes.byref(answer))) == 0

    def _check(self, code: int) -> None:
        if code:
            raise OSError(f"NVML answers {code}")
