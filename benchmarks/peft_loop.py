"""The baseline of benchmarks/hugging_face.py: user-level updates of a LoRA model by a plain loop over users with peft.

Each user begins from the round's parameters, takes the same local steps on the same batches, and the delta is clipped.
The base model is in bfloat16 with PyTorch's SDPA attention; the LoRA matrices and their gradients are float32. Nothing
of `unheard` computes here except the division of a user's tokens into batches.
"""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor


def user_delta(
    model: Any, trained: list[Tensor], start: list[Tensor], batches: np.ndarray, row_V: Tensor, eta: float, clip: float
) -> list[Tensor]:
    """Return the clipped delta of one user after one epoch of local steps, by trained tensor.

    Args:
        model: The peft model.
        trained: Its trained tensors, which are changed in place.
        start: The round's value of each trained tensor.
        batches: The user's batches of windows, as token ids of the store; of shape [S, B, T + 1].
        row_V: The row of the model's vocabulary for each token id of the store.
        eta: Learning rate.
        clip: S; the delta is clipped after every step.
    """
    with torch.no_grad():
        for parameter, first in zip(trained, start, strict=True):
            parameter.copy_(first)
    for batch_BW in batches:
        window_BW = torch.as_tensor(batch_BW, device=row_V.device)
        inputs, targets = window_BW[:, :-1], window_BW[:, 1:]
        labels = torch.where((targets > 0) & (inputs >= 0), row_V[targets.clamp(min=0)], -100)
        with torch.autocast(row_V.device.type, torch.bfloat16):
            logits = model(row_V[inputs.clamp(min=0)], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= eta * gradient
            delta = [p - s for p, s in zip(trained, start, strict=True)]
            norm = torch.sqrt(torch.stack([(d * d).sum() for d in delta]).sum())
            scale = torch.where(norm > clip, clip / norm, 1.0)
            for parameter, first, d in zip(trained, start, delta, strict=True):
                parameter.copy_(first + scale * d)
    return [(p - s).detach() for p, s in zip(trained, start, strict=True)]


def sum_of_users(
    model: Any, all_batches: list[np.ndarray], row_V: Tensor, eta: float, clip: float
) -> tuple[list[Tensor], float]:
    """Return the sum of the users' clipped deltas, and the seconds that it took.

    Args:
        model: The peft model. Its parameters are restored at the end.
        all_batches: The batches of each user.
        row_V: The row of the model's vocabulary for each token id of the store.
        eta: Learning rate.
        clip: S.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]
    total = [torch.zeros_like(p) for p in trained]
    if row_V.is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for batches in all_batches:
        for t, d in zip(total, user_delta(model, trained, start, batches, row_V, eta, clip), strict=True):
            t += d
    if row_V.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        for parameter, first in zip(trained, start, strict=True):
            parameter.copy_(first)
    return total, seconds
