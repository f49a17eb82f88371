"""Where Triton's kernels are tested: on the GPU if there is one, else on the CPU through Triton's interpreter."""

import importlib.util
import os

import pytest
import torch

KERNEL_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if KERNEL_DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install 'unheard[dev]')"
)
quietly = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""The interpreter computes with numpy, which warns where a GPU gives infinity or NaN without a word."""
