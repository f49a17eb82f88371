"""The vectorised engine: for any model, computes many users at once on a GPU and one user per core on a CPU.

On a GPU the users of a Hugging Face model are packed into streams of fixed length (engines/packed.py). For any other
model each user's parameters are one row of a matrix, and torch.func differentiates the losses of all rows together
(`vmap(grad(loss))`). The step is compiled by torch.compile if possible. Users are sorted by their number of local
steps, so that a chunk holds users of similar length; users who have finished leave the chunk. tests/agreement compares
the engine with engines/reference.py.

vmap cannot differentiate code that reads the values of its tensors (`.item()`, `if x.any()`, as in mixtures of
experts). The engine therefore tries the model on artificial tokens before the first cohort. If vmap fails, it computes
one user at a time.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from unheard.engines.engine import Cohort, Drawn, one_thread_per_chunk
from unheard.errors import ModelError
from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.plan import RoundPlan
from unheard.models.model import LanguageModel, mean_loss
from unheard.models.recurrent import lstm_states
from unheard.parameters import to_device
from unheard.updates.user_update import User, padded_batches

if TYPE_CHECKING:
    from unheard.engines.packed import PackedCohorts

Layers = dict[str, Tensor]
logger = logging.getLogger("unheard.engines")


def gradients_of_users(
    loss: Callable[..., Tensor], layers: Layers, window_UBW: Tensor, features_UF: Tensor | None
) -> Layers:
    """Return the gradient of each user's loss with respect to that user's own parameters, [U, ...] for each layer.

    Args:
        loss: The loss of one user, as a function of the layers, a batch [B, W] and features.
        layers: The parameters of each user, by name, with the users as the first dimension.
        window_UBW: One batch of each user.
        features_UF: The users' features; None if the model takes none.
    """
    in_dims = (0, 0, None if features_UF is None else 0)
    return vmap(grad(loss), in_dims=in_dims, randomness="error")(layers, window_UBW, features_UF)


def gradients_of_one_user(
    loss: Callable[..., Tensor], layers: Layers, window_UBW: Tensor, features_UF: Tensor | None
) -> Layers:
    """Return the same as `gradients_of_users`, for a chunk of one user, without vmap."""
    own = {name: layer[0] for name, layer in layers.items()}
    gradients = grad(loss)(own, window_UBW[0], None if features_UF is None else features_UF[0])
    return {name: gradient[None] for name, gradient in gradients.items()}


def check_model(model: LanguageModel, params_P: Tensor) -> None:
    """Compute one loss without vmap or torch.compile, so that an error in the model itself is raised unchanged.

    The call also moves the torch module of a model to the device.
    """
    window_UBW, features_UF = _artificial_users(model, params_P)
    with torch.no_grad():
        mean_loss(model, model.layout.split(params_P), window_UBW[0], None if features_UF is None else features_UF[0])


def supports_vmap(model: LanguageModel, params_P: Tensor) -> bool:
    """Whether vmap can differentiate this model; if not, a warning states the reason."""

    def loss(params: Layers, window_BW: Tensor, features_F: Tensor | None) -> Tensor:
        """Return the loss of one user on artificial data."""
        return mean_loss(model, params, window_BW, features_F)

    window_UBW, features_UF = _artificial_users(model, params_P)
    try:
        gradients_of_users(loss, model.layout.split(params_P.expand(2, -1)), window_UBW, features_UF)
        return True
    except (RuntimeError, ModelError) as error:
        warnings.warn(f"This model is trained one user at a time, which is slower: {error}", stacklevel=2)
        return False


def _artificial_users(model: LanguageModel, params_P: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return token ids [2, 1, 3] and features (None if the model takes none) of two artificial users."""
    window_UBW = torch.tensor([[[0, 3, 1]], [[0, 1, 3]]], device=params_P.device)
    features_UF = torch.zeros(2, model.user_features, device=params_P.device) if model.user_features else None
    return window_UBW, features_UF


CHUNK_BYTES = {"cpu": 2**27, "cuda": 16 * 2**30}
"""The number of bytes that a chunk of users may take, by type of device, if `users_at_once` is not given."""
ROWS_AT_ONCE = {"cpu": 1, "cuda": 16}
"""The number of rows of a chunk is rounded up to a multiple of this number, by type of device. On a GPU the step is
compiled again for each new number of rows."""


@dataclass(frozen=True)
class VectorisedEngine:
    """An engine for any model. It computes chunks of users with torch.func.vmap.

    Args:
        model: Any language model.
        device: "cpu" or "cuda".
        users_at_once: The number of users in a chunk. None: as many as fit into `CHUNK_BYTES`. Without effect on a CPU.
        precision: The precision of products: "bfloat16" (by autocast; the default on CUDA) or "float32". In either
            case deltas and the clip after local steps are float32, and the sum is exact.
    """

    ALONE_ON: ClassVar[tuple[str, ...]] = ("cpu",)
    """The types of devices on which users are computed one at a time; `users_at_once` has no effect there."""
    model: LanguageModel
    device: torch.device = torch.device("cpu")
    users_at_once: int | None = None
    precision: str = "auto"
    _compiled: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def unsupported(cls, model: LanguageModel, precision: str) -> str | None:
        """Return None: every model is supported, in every precision (see `EngineClass.unsupported`)."""
        return None

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        """Return the sum of the users' clipped updates (see `Engine.sum_updates`).

        Computes many users at once on a GPU, and one user per thread on a CPU.
        """
        params_P = params_P.to(self.device)
        self._choose(params_P)
        seed = int(rng.integers(2**63))
        if (packed := self._compiled.get("packed")) is not None:
            return packed.sum_updates(params_P, users, plan, seed)
        batches = [plan.update.batches(user, seed) for user in users]
        by_length = sorted(range(len(users)), key=lambda k: batches[k].shape, reverse=True)

        def chunk_sum(chunk: list[int]) -> CohortSum:
            """Return the sum of the contributions of one chunk, given by the indices of its users."""
            unclipped_U = torch.ones(len(chunk), dtype=torch.bool, device=self.device) if plan.adaptive_clip else None
            delta_UP = self._deltas(params_P, [users[k] for k in chunk], [batches[k] for k in chunk], plan, unclipped_U)
            weight_units_U = plan.weights.units(np.array([len(users[k].tokens) for k in chunk]))
            return plan.contribution.of_users(delta_UP, weight_units_U, unclipped_U)

        chunks = list(self._chunks(by_length, batches))
        with one_thread_per_chunk(self.device) as run_all:
            return plan.contribution.sum(run_all(chunk_sum, chunks), self.model.layout.total)

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """Return the sum of each cohort, computed one cohort after the other (see `Engine.sum_cohorts`)."""
        return [self.sum_updates(c.params_P, c.users, c.plan, c.rng) for c in cohorts]

    def _chunks(self, by_length: list[int], batches: list[np.ndarray]) -> Iterator[list[int]]:
        """Divide users into chunks that fit into memory. All batches of a chunk have the same shape.

        Args:
            by_length: The indices of the users, sorted by the shapes of their batches.
            batches: The batches [S, B, W] of each user.
        """
        # DP: only batches of one size share a chunk. Products of another size round differently: if batches were padded
        # to the largest of the chunk, the size of another user's batch would change a user's contribution.
        for _, alike in groupby(by_length, key=lambda k: batches[k].shape[1:]):
            users = list(alike)
            largest = self._chunk_size(batches[users[0]])
            # Chunks of equal size, so that they can use the same compiled step.
            size = -(-len(users) // -(-len(users) // largest))
            yield from (users[start : start + size] for start in range(0, len(users), size))

    def _deltas(
        self,
        theta0_P: Tensor,
        users: list[User],
        batches: list[np.ndarray],
        plan: RoundPlan,
        unclipped_U: Tensor | None = None,
    ) -> Tensor:
        """Compute the delta of each user of a chunk, [U, P], before the clip of the last local step.

        Args:
            theta0_P: The parameters at the beginning of the round.
            users: The users, sorted by descending number of local steps, so that unfinished users are the first rows.
            batches: The batches [S, B, W] of each user.
            plan: The plan of the round.
            unclipped_U: Set to False in place for users of whom a local step is clipped.
        """
        # Without a batch size the shapes differ in each cohort, so compilation would take longer than it saves.
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
        scale_UJ = torch.ones(rows, len(balls), dtype=theta0_P.dtype, device=self.device)
        # A tensor, so that the step is not compiled again for another learning rate or another S.
        numbers = to_device(
            np.array([eta, 1 - eta * plan.update.update_penalty, *(b.radius for b in balls)]), self.device
        )
        local_step = self._step if is_compiled else self._local_step
        for step in range(window_USBW.shape[1]):
            at_work = int((num_steps_U > step).sum())
            rows = _whole(at_work, multiple)
            features_now = None if features_UF is None else features_UF[:rows]
            moved_UP, moved_scale_UJ = local_step(
                theta0_P,
                delta_UP[:rows],
                scale_UJ[:rows],
                window_USBW[:rows, step],
                features_now,
                numbers.to(theta0_P.dtype),
                tuple((b.where.start, b.where.stop) for b in balls),
            )
            if unclipped_U is not None:
                unclipped_U[:at_work] &= (moved_scale_UJ[:at_work] == 1).all(dim=1)
            # `moved_UP` may also contain rows of finished users and of padding; they are not used.
            if at_work == len(users):
                delta_UP, scale_UJ = moved_UP, moved_scale_UJ
            else:
                delta_UP[:at_work].copy_(moved_UP[:at_work])
                scale_UJ[:at_work].copy_(moved_scale_UJ[:at_work])
        # The aggregation applies the clip of the last step: it clips to the same balls.
        return delta_UP[: len(users)]

    def _step(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Take one local step of a chunk (see `_local_step`). On CUDA the step is compiled if possible."""
        if self.device.type == "cuda" and self._compiled.get("step") is not False:
            try:
                if "step" not in self._compiled:
                    torch.compiler.allow_in_graph(lstm_states)
                    self._compiled["step"] = torch.compile(self._local_step)
                return self._compiled["step"](*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Without compilation the step is slower, and the result is the same.
                warnings.warn(f"This model cannot be compiled, and trains more slowly: {error}", stacklevel=2)
                self._compiled["step"] = False
        return self._local_step(*args)

    def _local_step(
        self,
        theta0_P: Tensor,
        delta_UP: Tensor,
        scale_UJ: Tensor,
        window_UBW: Tensor,
        features_UF: Tensor | None,
        numbers: Tensor,
        balls: tuple[tuple[int, int], ...],
    ) -> tuple[Tensor, Tensor]:
        """Take one local step of each user: delta <- keep * delta - eta * gradient. Return the delta and its clip.

        The clip is not applied yet: the next call applies it when it reads the delta, which saves a pass over memory.
        If the model projects its parameters after local steps, the projection comes before the clip.

        Args:
            theta0_P: The parameters at the beginning of the round.
            delta_UP: The users' deltas so far, before the clip of the last step.
            scale_UJ: The clip of the last step: the factor of each ball, 1 where nothing was clipped.
            window_UBW: One local batch of each user.
            features_UF: The users' features, if the model takes them.
            numbers: eta, keep = 1 - eta * lambda, and the radii of the balls.
            balls: The start and end of each ball of the clip.

        Returns:
            The new deltas [U, P] before their clip, and the factors of their clip [U, J].
        """

        def loss(params: dict[str, Tensor], window_BW: Tensor, features_F: Tensor | None) -> Tensor:
            """Return the mean loss of one user on one batch."""
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_coarse):
                return mean_loss(self.model, params, window_BW, features_F)

        if len(balls) == 1:
            delta_UP = delta_UP * scale_UJ
        elif balls:
            parts = [delta_UP[:, start:stop] * scale_UJ[:, j, None] for j, (start, stop) in enumerate(balls)]
            delta_UP = torch.cat(parts, dim=1)
        layers = self.model.layout.split(theta0_P + delta_UP)
        gradients = self._gradients(loss, layers, window_UBW, features_UF)
        eta, keep = numbers[0], numbers[1]
        moved = [
            (keep * layer - eta * gradients[name].to(layer.dtype)).reshape(len(layer), -1)
            for name, layer in self.model.layout.split(delta_UP).items()
        ]
        moved_UP = torch.cat(moved, dim=1)
        if self.model.projects_locally:
            moved_UP = self.model.project_local(theta0_P + moved_UP) - theta0_P
        scales = []
        for (start, stop), radius in zip(balls, numbers[2:], strict=True):
            norm_U = torch.linalg.vector_norm(moved_UP[:, start:stop], dim=1)
            # `where` instead of min(1, S / norm): for a NaN the minimum could be 1, and the delta would not be clipped.
            scales.append(torch.where(norm_U > radius, radius / norm_U, 1.0))
        return moved_UP, torch.stack(scales, dim=1) if scales else scale_UJ

    def _gradients(
        self, loss: Callable[..., Tensor], layers: dict[str, Tensor], window_UBW: Tensor, features_UF: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the gradient of each user's loss with respect to that user's own parameters, with or without vmap."""
        return (gradients_of_one_user if self._is_alone else gradients_of_users)(loss, layers, window_UBW, features_UF)

    def _choose(self, params_P: Tensor) -> None:
        """Decide at the first cohort how users are computed: packed into streams, with vmap, or one at a time."""
        if "alone" in self._compiled:
            return
        check_model(self.model, params_P)
        self._compiled["packed"] = self._packed(params_P)
        if self._compiled["packed"] is not None:
            self._compiled["alone"] = False
            return
        # DP: on a CPU every user has operations of their own. If users shared an array, the position of a user would
        # change the result: torch computes the end of an array by other code, and the last bit of a sigmoid differs.
        self._compiled["alone"] = self.device.type in self.ALONE_ON or not supports_vmap(self.model, params_P)

    def _packed(self, params_P: Tensor) -> "PackedCohorts | None":
        """Return the packed computation of a Hugging Face model (engines/packed.py).

        Return None for other models, in float32, on a CPU, and, with a warning, if the model cannot be packed.
        """
        if self.device.type in self.ALONE_ON or not self._is_coarse or not hasattr(self.model, "store_module"):
            return None
        from unheard.engines.packed import PackedCohorts
        from unheard.models.packed import CannotPack

        packed = PackedCohorts(self.model, self.device, torch.bfloat16, users_at_once=self.users_at_once, say=_progress)
        try:
            packed.check(params_P)
            return packed
        except (CannotPack, RuntimeError, ModelError) as error:
            warnings.warn(f"The users of this model cannot be packed, so it trains more slowly: {error}.", stacklevel=2)
            return None

    @property
    def _is_alone(self) -> bool:
        """Whether users are computed one at a time, without vmap.

        The choice is made once for all cohorts. Products of another shape round differently, and a user's contribution
        must not depend on the other users of the cohort.
        """
        return self._compiled.get("alone", False)

    @property
    def _is_coarse(self) -> bool:
        """Whether products are computed in bfloat16."""
        return self.precision == "bfloat16" or (self.precision == "auto" and self.device.type == "cuda")

    def _features(self, users: list[User], rows: int) -> Tensor | None:
        """Return the features of the users, padded with zeros to [rows, F]; None if the model takes no features."""
        if not self.model.user_features:
            return None
        known = np.stack([u.features for u in users if u.features is not None])
        return to_device(np.pad(known, ((0, rows - len(known)), (0, 0))), self.device)

    def _chunk_size(self, batches_SBW: np.ndarray) -> int:
        """Return how many users fit into a chunk.

        The estimate per user is six copies of the parameters, four copies of the logits, and the model's activations.

        Args:
            batches_SBW: The batches of the largest user of the chunk.
        """
        if self._is_alone:
            return 1
        if self.users_at_once:
            return self.users_at_once
        _, B, W = batches_SBW.shape
        each_token = 4 * self.model.vocabulary_size + self.model.activations_per_token(W - 1)
        bytes_a_user = 4 * (6 * self.model.layout.total + B * (W - 1) * each_token)
        return max(1, CHUNK_BYTES[self.device.type] // bytes_a_user)


def _progress(line: str) -> None:
    """Print a line about slow work that has no progress bar, such as a compilation, on standard error.

    Prints nothing while the package's loggers are silenced: private selection silences them during its trials, because
    one line for each group of trials would reveal their number.
    """
    if logger.isEnabledFor(logging.CRITICAL):
        print(f"unheard: {line}", file=sys.stderr, flush=True)


def _whole(rows: int, multiple: int) -> int:
    """Round a number of rows up to a multiple."""
    return -(-rows // multiple) * multiple
