"""The CUDA kernels, compiled for a CPU by cuda_on_cpu.h, agree with the plain step."""

import pytest
import torch

import unheard
from tests.cuda_on_cpu import KernelOnCPU, needs_compiler
from tests.engines.test_kernels import cohort, errors, run_kernels
from tests.kernels import KERNEL_DEVICE, needs_triton, quietly
from unheard.engines.engine import Cohort
from unheard.randomness import reproducible_generator

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
    ("options", "clip", "tuning"),
    [
        ({}, unheard.FlatClip(norm=0.5), {}),
        ({}, unheard.FlatClip(norm=0.5), {"attend_words": 64, "dense_tiles": 2}),
        ({"tied": False, "unit_norm": False}, unheard.PerLayerClip(norm=1.0), {}),
    ],
    ids=["tied", "other tiles", "untied"],
)
def test_steps_agree_with_reference(options, clip, tuning):
    model = unheard.TiedLSTM(**SIZES, **options)
    cohorts = [cohort(model, clip, penalty=0.1, lengths=(33, 1, 18, 20, 9), **BATCH)]
    assert 1e-4 < max(errors(model, cohorts, torch.bfloat16, **tuning)) < 0.05


def test_users_of_several_runs_share_clusters_and_nothing_else():
    model = unheard.TiedLSTM(**SIZES)
    runs = [
        cohort(model, unheard.FlatClip(norm=0.5), seed=1, lengths=(20, 17), **BATCH),
        cohort(model, unheard.NoClip(), seed=2, learning_rate=0.4, lengths=(18, 33), **BATCH),
    ]
    together = run_kernels(model, runs, torch.bfloat16).delta_UP.clone()
    row = 0
    for run in runs:
        fresh = Cohort(params_P=run.params_P, users=run.users, plan=run.plan, rng=reproducible_generator(0))
        alone = run_kernels(model, [fresh], torch.bfloat16).delta_UP
        assert torch.equal(together[row : row + 2], alone[:2])
        row += 2


@pytest.mark.parametrize("clip", [unheard.FlatClip(norm=0.5), unheard.PerLayerClip(norm=1.0)], ids=["flat", "layers"])
def test_the_squared_norms_are_those_of_the_deltas(clip):
    model = unheard.TiedLSTM(**SIZES)
    # the second user takes no step, and the last row is empty
    buffers = run_kernels(model, [cohort(model, clip, lengths=(33, 1, 18), **BATCH)], torch.bfloat16)
    delta_UP = buffers.delta_UP[:3].double().cpu()
    assert not delta_UP[1].any()
    layers = (
        [slice(0, model.layout.total)] if isinstance(clip, unheard.FlatClip) else list(model.layout.slices.values())
    )
    for m, layer in enumerate(layers):
        exact_U = delta_UP[:, layer].square().sum(dim=1)
        assert torch.allclose(buffers.square_UM[:3, m].cpu(), exact_U, rtol=2.0**-20)
