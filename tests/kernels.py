"""The device for tests of Triton kernels: the GPU if there is one, else the CPU with Triton's interpreter."""

import importlib.util
import os

import pytest
import torch

KERNEL_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if KERNEL_DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before a kernel is imported

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install 'unheard[dev]')"
)
quietly = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Ignores warnings of numpy, which the interpreter uses: numpy warns about infinity and NaN, and a GPU does not."""
