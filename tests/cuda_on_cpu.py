"""Runs the CUDA kernels of the stacked engine on a CPU: compiles their sources with g++ and cuda_on_cpu.h."""

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from unheard.engines.stacked.cuda_kernels import source

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


class KernelOnCPU:
    """The same interface as `CudaKernel`."""

    def __init__(self, name: str, kernel: str, constants: dict[str, int], *, threads: int, shared_bytes: int) -> None:
        library = _compiled(name, tuple(constants.items()))
        self.run = getattr(library, f"run_{kernel}")
        self.threads, self.shared_bytes = threads, shared_bytes

    def clusters_at_once(self) -> int:
        return 2

    def __call__(self, grid: tuple[int, int], args: Sequence[torch.Tensor | int]) -> None:
        numbers = [ctypes.c_int(a if isinstance(a, int) else 0) for a in args]
        pointers = [
            a.data_ptr() if isinstance(a, torch.Tensor) else ctypes.addressof(n)
            for a, n in zip(args, numbers, strict=True)
        ]
        self.run(*grid, self.threads, self.shared_bytes, (ctypes.c_void_p * len(pointers))(*pointers))


@functools.cache
def _compiled(name: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    text = source(name, dict(constants))
    wrappers = ""
    for cluster, kernel, parameters in re.findall(
        r"^KERNEL (IN_CLUSTERS)?.*? (\w+)\(\n(.*?)\n\) \{", text, re.S | re.M
    ):
        casts = ", ".join(
            f"({of})a[{k}]" if of.endswith("*") else f"*(int*)a[{k}]"
            for k, of in enumerate(parameter.strip().rsplit(" ", 1)[0] for parameter in parameters.split(","))
        )
        wrappers += (
            f'extern "C" void run_{kernel}(int x, int y, int threads, int bytes, void** a) {{\n'
            f"    launch(x, y, {4 if cluster else 1}, threads, bytes, [&] {{ {kernel}({casts}); }});\n}}\n"
        )
    folder = Path(tempfile.mkdtemp())
    header = Path(__file__).with_name("cuda_on_cpu.h")
    (folder / "kernels.cpp").write_text(f'#include "{header}"\n{text}\n{wrappers}')
    flags = ["-Og", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w", "-std=c++17"]
    subprocess.run(["g++", *flags, "-o", str(folder / "kernels.so"), str(folder / "kernels.cpp")], check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))
    shutil.rmtree(folder)
    return library
