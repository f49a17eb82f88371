"""Compiles and launches the kernels in CUDA C++ (folder cuda/).

They replace some of the Triton kernels if the GPU and the model allow it (`supported`). A kernel is compiled by NVRTC,
which is installed with PyTorch, when it is first used. The machine code is cached on disk, in Triton's cache. Constants
such as the sizes of the model are defined by #define before the source.

The tests run the same sources on a CPU (tests/cuda_on_cpu.h) and compare the results with those of plain.py."""

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
"""The largest number of positions of a local batch. The results of more positions do not fit into shared memory."""


def supported(buffers: Buffers) -> bool:
    """Whether the kernels support this model, batch, precision and device.

    They support the LSTM with 256 units and without user features, in bfloat16, with batches of 8 sequences, on a
    Hopper GPU; the other limits are in the code.
    """
    s, delta = buffers.sizes, buffers.delta_UP
    if delta.dtype != torch.bfloat16 or s.is_gru or s.F or s.H != 256 or s.B != 8:
        return False
    if s.D % 32 or s.D > 128 or s.N % 16 or s.N > LARGEST_BATCH or (s.V * s.D) % 8:
        return False
    return can_run(delta.device)


def can_run(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU and NVRTC can be loaded. The kernels need the GPU's clusters of blocks."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        _nvrtc()
    except OSError:
        return False
    return True


def source(name: str, constants: dict[str, int]) -> str:
    """Return the CUDA C++ source of a file of cuda/, after parts.cuh and the definitions of the constants."""
    files = resources.files(__package__) / "cuda"
    defined = "".join(f"#define {key} {value}\n" for key, value in constants.items())
    return (files / "parts.cuh").read_text() + defined + (files / name).read_text()


class _Attribute(ctypes.Structure):
    """The C structure CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_ulonglong), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """The C structure CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class CudaKernel:
    """A compiled kernel, loaded on the current CUDA device.

    Args:
        name: The name of the file in cuda/.
        kernel: The name of the function in the file.
        constants: The constants to define before the source.
        threads: The number of threads per block.
        shared_bytes: The bytes of shared memory per block.

    Raises:
        RuntimeError: The kernel cannot be compiled or loaded.
    """

    def __init__(self, name: str, kernel: str, constants: dict[str, int], *, threads: int, shared_bytes: int) -> None:
        self.threads, self.shared_bytes = threads, shared_bytes
        self.function = ctypes.c_void_p()
        driver = _driver()
        module = _module(name, tuple(constants.items()), torch.cuda.current_device())
        _check(driver.cuModuleGetFunction(ctypes.byref(self.function), module, kernel.encode()))
        # 8 is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES. The default limit is 48 KiB.
        _check(driver.cuFuncSetAttribute(self.function, 8, ctypes.c_int(shared_bytes)))

    def clusters_at_once(self) -> int:
        """Return how many clusters of four blocks the GPU can run at the same time."""
        # The first 4 is CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION; (4, 1, 1) is the size of a cluster.
        attribute = _Attribute(4, (ctypes.c_uint * 16)(4, 1, 1))
        config = _Config(4, 1, 1, self.threads, 1, 1, self.shared_bytes, None, ctypes.pointer(attribute), 1)
        count = ctypes.c_int()
        _check(_driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self.function, ctypes.byref(config)))
        return max(1, count.value)

    def __call__(self, grid: tuple[int, int], args: Sequence[Tensor | int]) -> None:
        """Launch the kernel on the current stream, without waiting for it.

        Args:
            grid: The number of blocks in x and y.
            args: Tensors, which are passed as pointers, and numbers, which are passed as int.
        """
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
    """Load the kernels of one source file on a device."""
    code = machine_code(source(name, dict(constants)), torch.cuda.get_device_capability(device))
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
    return module


def machine_code(text: str, capability: tuple[int, int]) -> bytes:
    """Return the machine code of a source, from the cache on disk if it is there; else compile it and cache it."""
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
    """Compile a source with NVRTC and return its machine code.

    Args:
        text: The CUDA C++ source.
        architecture: The GPU architecture, such as "sm_90".

    Raises:
        RuntimeError: The source cannot be compiled. The error contains the compiler's messages.
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
    """Return the library of the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Return the library NVRTC of PyTorch's CUDA version, from the system or from the packages that PyTorch requires.

    Raises:
        OSError: The library is not installed.
    """
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    packages = [path for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{name}")]
    for path in (name, *map(str, packages)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError(f"{name} is not installed.")


def _check(result: int) -> None:
    """Raise `RuntimeError` with the driver's message if a call of the CUDA driver failed."""
    if result:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError(f"CUDA: {words.value.decode() if words.value else result}")
