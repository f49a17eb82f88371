"""The CUDA kernels compute what the plain step computes, here on a CPU: cuda_on_cpu.h takes the place of the GPU."""

import pytest
import torch

import unheard
from tests.cuda_on_cpu import KernelOnCPU, needs_compiler
from tests.engines.test_kernels import cohort, errors
from tests.kernels import KERNEL_DEVICE, needs_triton, quietly

pytestmark = [pytest.mark.system, needs_triton, needs_compiler, quietly]  # runs a compiler

SIZES = dict(vocabulary_size=70, embedding_size=32, hidden_size=256)
BATCH = dict(B=8, T=2)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    from unheard.engines.stacked import cuda_kernels
    from unheard.engines.stacked.kernels import KernelStep

    if KERNEL_DEVICE.type == "cpu":
        monkeypatch.setattr(KernelStep, "kernel", KernelOnCPU)
        monkeypatch.setattr(cuda_kernels, "can_run", lambda device: True)


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({}, unheard.FlatClip(norm=0.5)),
        ({"tied": False, "unit_norm": False}, unheard.PerLayerClip(norm=1.0)),
    ],
    ids=["tied", "untied"],
)
def test_a_step_agrees_with_reference(options, clip):
    model = unheard.TiedLSTM(**SIZES, **options)
    found = errors(model, [cohort(model, clip, penalty=0.1, lengths=(33, 1, 18, 20), **BATCH)], torch.bfloat16)
    assert 1e-4 < max(found) < 0.05
