"""Gradients of users' losses, each by that user's own parameters: of many users at once, or, where a model resists that, of one.

In: a loss, layers [U, ...], windows [U, B, W]. Out: gradients [U, ...]. vmap cannot follow code that looks into its tensors
(`.item()`, `if x.any()`, as mixtures of experts have it). Such a model is found out before the first user, on made-up words.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap

from unheard.errors import ModelError
from unheard.models.model import LanguageModel, mean_loss

Layers = dict[str, Tensor]


def of_many_users(
    loss: Callable[..., Tensor], layers: Layers, window_UBW: Tensor, features_UF: Tensor | None
) -> Layers:
    in_dims = (0, 0, None if features_UF is None else 0)
    return vmap(grad(loss), in_dims=in_dims, randomness="error")(layers, window_UBW, features_UF)


def of_one_user(loss: Callable[..., Tensor], layers: Layers, window_UBW: Tensor, features_UF: Tensor | None) -> Layers:
    """The same for a chunk of one user, without vmap."""
    one = {name: layer[0] for name, layer in layers.items()}
    gradients = grad(loss)(one, window_UBW[0], None if features_UF is None else features_UF[0])
    return {name: gradient[None] for name, gradient in gradients.items()}


def try_out(model: LanguageModel, params_P: Tensor) -> None:
    """What is wrong with the model itself is an error of its own, before any transform; this also moves a module to the device."""
    window_UBW, features_UF = _made_up(model, params_P)
    with torch.no_grad():
        mean_loss(model, model.layout.split(params_P), window_UBW[0], None if features_UF is None else features_UF[0])


def takes_many(model: LanguageModel, params_P: Tensor) -> bool:
    """Whether vmap can take this model; where not, a warning says why it will be slower."""

    def loss(params: Layers, window_BW: Tensor, features_F: Tensor | None) -> Tensor:
        return mean_loss(model, params, window_BW, features_F)

    window_UBW, features_UF = _made_up(model, params_P)
    try:
        of_many_users(loss, model.layout.split(params_P.expand(2, -1)), window_UBW, features_UF)
        return True
    except (RuntimeError, ModelError) as error:
        warnings.warn(f"This model takes one user at a time, and trains more slowly: {error}", stacklevel=2)
        return False


def _made_up(model: LanguageModel, params_P: Tensor) -> tuple[Tensor, Tensor | None]:
    """Two users' words and features, of nobody."""
    window_UBW = torch.tensor([[[0, 3, 1]], [[0, 1, 3]]], device=params_P.device)
    features_UF = torch.zeros(2, model.user_features, device=params_P.device) if model.user_features else None
    return window_UBW, features_UF
