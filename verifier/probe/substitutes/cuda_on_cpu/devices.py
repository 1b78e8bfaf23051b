"""Which CUDA devices there are, which is the current one, and what they are like."""

import os
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ...compat.cuda import answer_accelerator, answer_workspaces
from ...session import Session
from ._answers import always, answer
from .marks import CUDA, device_from

NAME = "CUDA on the CPU (fsdp2)"
CAPABILITY = (8, 0)  # bfloat16, and none of the features of later GPUs
NCCL = (2, 27, 3)
VERSION = "12.8"
CUDNN = 91002
_REAL = torch.device
_PAGE = os.sysconf("SC_PAGE_SIZE")


def total_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def _index(device: Any = None) -> int:
    found = device_from("cuda" if device is None else device)
    return CUDA.current if found is None or found.index is None else found.index


def _set(device: Any) -> None:
    if not isinstance(device, int) or device >= 0:
        CUDA.current = _index(device)


class _Chosen:
    """`torch.cuda.device(...)`: another current device for a while."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None or device == -1 else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = CUDA.current
        _set(self.idx)

    def __exit__(self, *error: object) -> None:
        CUDA.current = self.prev_idx


class _ChosenOf(_Chosen):
    """`torch.cuda.device_of(tensor)`."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.device if getattr(tensor, "is_cuda", False) else None)


def of_device(result: Callable[[], Any], begins: bool = False) -> Callable[..., Any]:
    """A function of a device that answers `result()`, and raises where no such device is;
    `begins`: CUDA is used from then on.
    """

    def answered(device: Any = None) -> Any:
        if begins:
            CUDA.begin()
        if device is not None:
            _index(device)
        return result()

    return answered


def _properties(device: Any = None) -> SimpleNamespace:
    CUDA.begin()
    index = _index(device)
    major, minor = CAPABILITY
    shape = {
        "multi_processor_count": os.cpu_count(),
        "warp_size": 32,
        "L2_cache_size": 1 << 25,
        "regs_per_multiprocessor": 65536,
    }
    shape |= {"shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": 163 << 10}
    shape |= {
        "shared_memory_per_multiprocessor": 164 << 10,
        "max_threads_per_multi_processor": 2048,
    }
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=total_memory(),
        gcnArchName="",
        uuid=uuid.UUID(int=index),
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
        is_integrated=0,
        is_multi_gpu_board=0,
        **shape,
    )


_BOTH: dict[str, Any] = {
    "is_available": lambda: CUDA.count > 0,
    "device_count": lambda: CUDA.count,
    "synchronize": of_device(lambda: None, begins=True),
}
_OF_CUDA = {
    **_BOTH,
    "_lazy_init": CUDA.begin,
    "init": CUDA.begin,
    "is_initialized": lambda: CUDA.initialized,
    "current_device": of_device(lambda: CUDA.current, begins=True),
    "set_device": _set,
    "get_device_name": of_device(lambda: NAME, begins=True),
    "get_device_capability": of_device(lambda: CAPABILITY, begins=True),
    "get_device_properties": _properties,
    "get_arch_list": lambda: ["sm_80"],
    "is_bf16_supported": always(True),
    "is_tf32_supported": always(True),
    "can_device_access_peer": always(True),
    "ipc_collect": always(None),
    **dict.fromkeys(
        ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), always(0)
    ),
    "set_sync_debug_mode": always(None),
    "get_sync_debug_mode": always(0),
    "is_current_stream_capturing": always(False),
    "cudart": lambda: _Runtime(),
    "_sleep": always(None),
    "get_allocator_backend": always("native"),
}
_OF_ACCELERATOR = {
    **_BOTH,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: _index(),
    "current_device_idx": lambda: _index(),
    "set_device_index": _set,
    "set_device_idx": _set,
    "get_device_capability": always(
        {"supported_dtypes": {torch.float32, torch.bfloat16, torch.float16}}
    ),
}


def install(session: Session) -> None:
    """Answer `torch.cuda` and `torch.accelerator`."""
    CUDA.of_node = session.request.node_devices
    answer(session, "torch.cuda", _OF_CUDA)
    answer(session, "torch.accelerator", _OF_ACCELERATOR)
    answer(session, "torch.cuda.nccl", {"version": always(NCCL), "is_available": always(True)})
    answer(session, "torch.cuda.profiler", {"start": always(None), "stop": always(None)})
    answer(session, "torch.backends.cuda", {"is_built": always(True)})
    answer(
        session, "torch.backends.cudnn", {"version": always(CUDNN), "is_available": always(True)}
    )
    torch.version.cuda = VERSION
    torch.device = _Device  # type: ignore[assignment, misc]
    torch.cuda.device, torch.cuda.device_of = _Chosen, _ChosenOf  # type: ignore[assignment, misc]
    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "device_index"):
        torch.accelerator.device_index = _Chosen  # type: ignore[assignment, misc]
    answer_accelerator(torch.device("cuda"))
    answer_workspaces()


class _AnyDevice(type):
    """`torch.device`, which reads the number of a device only where there is one."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _REAL)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device")
        return _REAL("cuda", first) if isinstance(first, int) else _REAL(*args, **kwargs)


class _Device(metaclass=_AnyDevice):
    pass


_Device.__module__, _Device.__name__, _Device.__qualname__ = "torch", "device", "device"


class _Runtime:
    """`torch.cuda.cudart()`: every call succeeds and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return always(0)
