"""Any model: on a GPU many users at once, each user's parameters a row, torch.func differentiating all rows together; on a CPU one.

Its plain twin is engines/reference.py. Users are sorted by how many local steps they take, so a chunk holds users of like length,
and those who have finished leave it; nobody waits for the longest.
Gradients of users' losses, each by that user's own parameters: of many users at once, or, where a model resists that, of one.

In: a loss, layers [U, ...], windows [U, B, W]. Out: gradients [U, ...]. vmap cannot follow code that looks into its tensors
(`.item()`, `if x.any()`, as mixtures of experts have it). Such a model is found out before the first user, on made-up words.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from unheard.devices import to_device
from unheard.engines.cpu_threads import one_thread_a_chunk
from unheard.engines.engine import Cohort, Drawn
from unheard.errors import ModelError
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.values import CohortSum
from unheard.models.model import LanguageModel, mean_loss
from unheard.updates.batching import padded_batches
from unheard.updates.users import User

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


CHUNK_BYTES = {"cpu": 2**27, "cuda": 16 * 2**30}
"""Memory that a chunk of users may take, by kind of device, when users_at_once is not given."""
ROWS_AT_ONCE = {"cpu": 1, "cuda": 16}
"""Rows of a chunk go in multiples of so many: on a GPU a step is compiled anew for numbers of users that it has not seen."""


@dataclass(frozen=True)
class VectorisedEngine:
    """Chunks of users through torch.func.vmap."""

    ALONE_ON: ClassVar[tuple[str, ...]] = ("cpu",)
    """Kinds of devices on which users go one at a time, whatever `users_at_once` says."""
    model: LanguageModel
    device: torch.device = torch.device("cpu")
    users_at_once: int | None = None
    precision: str = "auto"
    """Of products: bfloat16 (by autocast; the default on CUDA) or float32. Deltas, clip and sum are float32 or exact either way."""
    _compiled: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls, model: LanguageModel, device: torch.device, users_at_once: int | None, precision: str
    ) -> "VectorisedEngine":
        return cls(model, device, users_at_once, precision)

    @classmethod
    def unsupported(cls, model: LanguageModel, precision: str) -> str | None:
        return None

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        params_P = params_P.to(self.device)
        self._choose(params_P)
        seed = int(rng.integers(2**63))
        batches = [plan.update.batches(user, seed) for user in users]
        by_length = sorted(range(len(users)), key=lambda k: batches[k].shape, reverse=True)

        def chunk_sum(chunk: list[int]) -> CohortSum:
            unclipped_U = torch.ones(len(chunk), dtype=torch.bool, device=self.device) if plan.adaptive_clip else None
            delta_UP = self._deltas(params_P, [users[k] for k in chunk], [batches[k] for k in chunk], plan, unclipped_U)
            weight_units_U = plan.weights.units(np.array([len(users[k].tokens) for k in chunk]))
            return plan.contribution.of_users(delta_UP, weight_units_U, unclipped_U)

        chunks = list(self._chunks(by_length, batches))
        with one_thread_a_chunk(self.device) as run_all:
            return plan.contribution.sum(run_all(chunk_sum, chunks), self.model.layout.total)

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        return [self.sum_updates(c.params_P, c.users, c.plan, c.rng) for c in cohorts]

    def _chunks(self, by_length: list[int], batches: list[np.ndarray]) -> Iterator[list[int]]:
        # DP: only batches of one size share a chunk. Products of another size round differently: filled up to the largest in the
        # chunk, one user would move what another adds.
        for _, alike in groupby(by_length, key=lambda k: batches[k].shape[1:]):
            users = list(alike)
            size = self._chunk_size(batches[users[0]])
            yield from (users[start : start + size] for start in range(0, len(users), size))

    def _deltas(
        self,
        theta0_P: Tensor,
        users: list[User],
        batches: list[np.ndarray],
        plan: RoundPlan,
        unclipped_U: Tensor | None = None,
    ) -> Tensor:
        """delta_k for each user of a chunk. `users` come longest first, so those still at work are the first so many rows."""
        # Batches of all of a user's data have another shape in each cohort: compiling would cost more than it saves.
        is_compiled = plan.update.batch_size is not None
        multiple = min(ROWS_AT_ONCE[self.device.type], self._chunk_size(batches[0])) if is_compiled else 1
        rows = _whole(len(users), multiple)
        num_steps_U = np.array([len(b) for b in batches])
        shape = (rows, int(num_steps_U.max()), *batches[0].shape[1:])
        window_USBW = to_device(padded_batches(batches, shape, np.int64), self.device)
        features_UF = self._features(users, rows)
        delta_UP = torch.zeros(rows, theta0_P.numel(), dtype=theta0_P.dtype, device=self.device)
        eta = plan.update.learning_rate
        balls = plan.contribution.balls
        # Numbers as tensors: a compiled step is for any learning rate and any S.
        numbers = to_device(
            np.array([eta, 1 - eta * plan.update.update_penalty, *(b.radius for b in balls)]), self.device
        )
        local_step = self._step if is_compiled else self._local_step
        for step in range(window_USBW.shape[1]):
            at_work = int((num_steps_U > step).sum())
            rows = _whole(at_work, multiple)
            features_now = None if features_UF is None else features_UF[:rows]
            moved_UP, was_clipped_U = local_step(
                theta0_P,
                delta_UP[:rows],
                window_USBW[:rows, step],
                features_now,
                numbers.to(theta0_P.dtype),
                tuple((b.where.start, b.where.stop) for b in balls),
            )
            # Who has finished, or is nobody, may be among the rows; what comes out for them is not looked at.
            delta_UP[:at_work].copy_(moved_UP[:at_work])
            if unclipped_U is not None:
                unclipped_U[:at_work] &= ~was_clipped_U[:at_work]
        return delta_UP[: len(users)]

    def _step(self, *args: Any) -> tuple[Tensor, Tensor]:
        """One local step of a chunk; on CUDA compiled, if it can be."""
        if self.device.type == "cuda" and self._compiled.get("step") is not False:
            try:
                if "step" not in self._compiled:
                    self._compiled["step"] = torch.compile(self._local_step)
                return self._compiled["step"](*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # what cannot be compiled runs as it is: slower, and the same
                warnings.warn(f"This model cannot be compiled, and trains more slowly: {error}", stacklevel=2)
                self._compiled["step"] = False
        return self._local_step(*args)

    def _local_step(
        self,
        theta0_P: Tensor,
        delta_UP: Tensor,
        window_UBW: Tensor,
        features_UF: Tensor | None,
        numbers: Tensor,
        balls: tuple[tuple[int, int], ...],
    ) -> tuple[Tensor, Tensor]:
        """delta <- Clip(keep * delta - eta * gradient) for each user, and who was clipped. Gradients are taken layer by layer,
        so that no user's is ever padded with zeros to the whole vector."""

        def loss(params: dict[str, Tensor], window_BW: Tensor, features_F: Tensor | None) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_coarse):
                return mean_loss(self.model, params, window_BW, features_F)

        layers = self.model.layout.split(theta0_P + delta_UP)
        gradients = self._gradients(loss, layers, window_UBW, features_UF)
        eta, keep = numbers[0], numbers[1]
        moved = [
            (keep * layer - eta * gradients[name].to(layer.dtype)).reshape(len(layer), -1)
            for name, layer in self.model.layout.split(delta_UP).items()
        ]
        moved_UP = torch.cat(moved, dim=1)
        was_clipped_U = torch.zeros(len(delta_UP), dtype=torch.bool, device=delta_UP.device)
        parts = []
        for (start, stop), radius in zip(balls, numbers[2:], strict=True):
            part_UL = moved_UP[:, start:stop]
            norm_U1 = torch.linalg.vector_norm(part_UL, dim=1, keepdim=True)
            # `where`, not min(1, S/norm): with a NaN the latter can come out as 1, which is no clip at all.
            parts.append(part_UL * torch.where(norm_U1 > radius, radius / norm_U1, 1.0))
            was_clipped_U = was_clipped_U | (norm_U1[:, 0] > radius)
        return (torch.cat(parts, dim=1) if len(parts) > 1 else (parts or [moved_UP])[0]), was_clipped_U

    def _gradients(
        self, loss: Callable[..., Tensor], layers: dict[str, Tensor], window_UBW: Tensor, features_UF: Tensor | None
    ) -> dict[str, Tensor]:
        """Of each user's loss, by each user's own parameters."""
        return (of_one_user if self._is_alone else of_many_users)(loss, layers, window_UBW, features_UF)

    def _choose(self, params_P: Tensor) -> None:
        if "alone" in self._compiled:
            return
        try_out(self.model, params_P)
        # DP: on a CPU every user has operations of their own. In one array with others it would matter who comes last: torch
        # computes an array's end by other code, where a sigmoid has another last bit.
        self._compiled["alone"] = self.device.type in self.ALONE_ON or not takes_many(self.model, params_P)

    @property
    def _is_alone(self) -> bool:
        """Whether users go one at a time, without vmap. Decided once, for everybody: products of another shape round otherwise,
        and what one user adds must not depend on who else was drawn."""
        return self._compiled.get("alone", False)

    @property
    def _is_coarse(self) -> bool:
        return self.precision == "bfloat16" or (self.precision == "auto" and self.device.type == "cuda")

    def _features(self, users: list[User], rows: int) -> Tensor | None:
        if not self.model.user_features:
            return None
        known = np.stack([u.features for u in users if u.features is not None])
        return to_device(np.pad(known, ((0, rows - len(known)), (0, 0))), self.device)

    def _chunk_size(self, batches_SBW: np.ndarray) -> int:
        """As many users as fit: about six copies of the parameters and four of the logits live at once for each, and what a deep
        model adds."""
        if self._is_alone:
            return 1
        if self.users_at_once:
            return self.users_at_once
        _, B, W = batches_SBW.shape
        each_token = 4 * self.model.vocabulary_size + self.model.activations_per_token(W - 1)
        bytes_a_user = 4 * (6 * self.model.layout.total + B * (W - 1) * each_token)
        return max(1, CHUNK_BYTES[self.device.type] // bytes_a_user)


def _whole(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
