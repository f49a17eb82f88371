"""The CUDA C++ kernels of the step (folder cuda/): compiles them when they are first used, and launches them.

They replace the Triton kernels that they are named after where the GPU and the model allow it: `supported` says where.
Compiled by NVRTC, which PyTorch brings along; the machine code is cached on disk in Triton's cache. Constants such as
the sizes of the model are defined before the source is compiled.

The tests run the same sources on a CPU (tests/cuda_on_cpu.h) and compare them with plain.py."""

import ctypes
import functools
import hashlib
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from unheard.engines.stacked.sizes import Buffers

LARGEST_BATCH = 80
"""The most positions of a local batch whose results fit the shared memory of a block."""


def supported(buffers: Buffers) -> bool:
    """Whether the kernels are for this model, precision and device: the LSTM with 256 units on a Hopper GPU."""
    s, delta = buffers.sizes, buffers.delta_UP
    if delta.dtype != torch.bfloat16 or s.is_gru or s.F or s.H != 256 or s.B != 8:
        return False
    if s.D % 32 or s.D > 128 or s.N % 16 or s.N > LARGEST_BATCH or (s.V * s.D) % 8:
        return False
    return can_run(delta.device)


def can_run(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU, which has clusters of blocks and enough shared memory, and NVRTC is there."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        _nvrtc()
    except OSError:
        return False
    return True


def source(name: str, constants: dict[str, int]) -> str:
    """The CUDA C++ source of a file of cuda/, with its constants."""
    files = resources.files(__package__) / "cuda"
    defined = "".join(f"#define {key} {value}\n" for key, value in constants.items())
    return (files / "parts.cuh").read_text() + defined + (files / name).read_text()


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_ulonglong), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class CudaKernel:
    """A compiled kernel.

    Args:
        name: of the file in cuda/.
        kernel: of the function in the file.
        constants: defined before the source.
        threads: per block.
        shared_bytes: of shared memory per block.
    """

    def __init__(self, name: str, kernel: str, constants: dict[str, int], *, threads: int, shared_bytes: int) -> None:
        self.threads, self.shared_bytes = threads, shared_bytes
        self.function = ctypes.c_void_p()
        driver = _driver()
        module = _module(name, tuple(constants.items()), torch.cuda.current_device())
        _check(driver.cuModuleGetFunction(ctypes.byref(self.function), module, kernel.encode()))
        # 8: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self.function, 8, ctypes.c_int(shared_bytes)))

    def clusters_at_once(self) -> int:
        """How many clusters of four blocks the GPU runs at the same time."""
        attribute = _Attribute(4, (ctypes.c_uint * 16)(4, 1, 1))  # 4: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        config = _Config(4, 1, 1, self.threads, 1, 1, self.shared_bytes, None, ctypes.pointer(attribute), 1)
        count = ctypes.c_int()
        _check(_driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self.function, ctypes.byref(config)))
        return max(1, count.value)

    def __call__(self, grid: tuple[int, int], args: Sequence[Tensor | int]) -> None:
        """Launches the kernel on the current stream."""
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            _driver().cuLaunchKernel(
                self.function, *grid, 1, self.threads, 1, 1, self.shared_bytes, stream, pointers, None
            )
        )


@functools.cache
def _module(name: str, constants: tuple[tuple[str, int], ...], device: int) -> ctypes.c_void_p:
    """A file's kernels, loaded on a device."""
    code = machine_code(source(name, dict(constants)), torch.cuda.get_device_capability(device))
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
    return module


def machine_code(text: str, capability: tuple[int, int]) -> bytes:
    """Machine code of a source: from the cache on disk, or compiled."""
    from triton.runtime.cache import get_cache_manager

    major, minor = capability
    key = hashlib.sha256(f"{text}\n{major}.{minor} {torch.version.cuda}".encode()).hexdigest()
    cache = get_cache_manager(key)
    cached = cache.get_file("kernels.cubin")
    if cached:
        return Path(cached).read_bytes()
    code = compile_source(text, f"sm_{major}{minor}")
    cache.put(code, "kernels.cubin", binary=True)
    return code


def compile_source(text: str, architecture: str) -> bytes:
    """Machine code of a source.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None):
        raise RuntimeError("NVRTC could not create a program.")
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC could not compile a kernel:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of PyTorch's CUDA version: from the system, or from the packages that PyTorch requires."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    packages = [path for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{name}")]
    for path in (name, *map(str, packages)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError(f"{name} is not installed.")


def _check(result: int) -> None:
    if result:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError(f"CUDA: {words.value.decode() if words.value else result}")
