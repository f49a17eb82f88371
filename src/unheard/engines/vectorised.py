"""The vectorised engine: any model, many users at once on a GPU, one user per core on a CPU.

On a GPU the users of a Hugging Face model are packed into streams of fixed length (engines/packed.py). For any other
model each user's parameters are one row, and torch.func differentiates the losses of all rows together
(`vmap(grad(loss))`). The step is compiled by torch.compile if possible. Users are sorted by their number of local
steps, so that a chunk holds users of similar length; users who have finished leave the chunk. tests/agreement compares
the engine with engines/reference.py.

vmap cannot differentiate code that reads the values of its tensors (`.item()`, `if x.any()`, as in mixtures of
experts). The engine tests the model with artificial tokens before the first user, and processes users of such a model
one at a time.
"""

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


def gradients_of_users(
    loss: Callable[..., Tensor], layers: Layers, window_UBW: Tensor, features_UF: Tensor | None
) -> Layers:
    """The gradient of each user's loss by that user's own parameters, [U, ...] for each layer.

    Args:
        loss: The loss of one user, as a function of the layers, a window and features.
        layers: The parameters of each user, by name, with the users as the first dimension.
        window_UBW: One batch of each user.
        features_UF: The users' features; None if the model takes none.
    """
    in_dims = (0, 0, None if features_UF is None else 0)
    return vmap(grad(loss), in_dims=in_dims, randomness="error")(layers, window_UBW, features_UF)


def gradients_of_one_user(
    loss: Callable[..., Tensor], layers: Layers, window_UBW: Tensor, features_UF: Tensor | None
) -> Layers:
    """`gradients_of_users` for a chunk of one user, without vmap."""
    own = {name: layer[0] for name, layer in layers.items()}
    gradients = grad(loss)(own, window_UBW[0], None if features_UF is None else features_UF[0])
    return {name: gradient[None] for name, gradient in gradients.items()}


def check_model(model: LanguageModel, params_P: Tensor) -> None:
    """Compute one loss outside of any transform, so that an error of the model itself is reported as such.

    The call also moves a torch module to the device.
    """
    window_UBW, features_UF = _artificial_users(model, params_P)
    with torch.no_grad():
        mean_loss(model, model.layout.split(params_P), window_UBW[0], None if features_UF is None else features_UF[0])


def supports_vmap(model: LanguageModel, params_P: Tensor) -> bool:
    """Whether vmap can differentiate this model; if not, a warning states the reason."""

    def loss(params: Layers, window_BW: Tensor, features_F: Tensor | None) -> Tensor:
        """The loss of one user on artificial data."""
        return mean_loss(model, params, window_BW, features_F)

    window_UBW, features_UF = _artificial_users(model, params_P)
    try:
        gradients_of_users(loss, model.layout.split(params_P.expand(2, -1)), window_UBW, features_UF)
        return True
    except (RuntimeError, ModelError) as error:
        warnings.warn(f"This model takes one user at a time, and trains more slowly: {error}", stacklevel=2)
        return False


def _artificial_users(model: LanguageModel, params_P: Tensor) -> tuple[Tensor, Tensor | None]:
    """The tokens and features of two artificial users."""
    window_UBW = torch.tensor([[[0, 3, 1]], [[0, 1, 3]]], device=params_P.device)
    features_UF = torch.zeros(2, model.user_features, device=params_P.device) if model.user_features else None
    return window_UBW, features_UF


CHUNK_BYTES = {"cpu": 2**27, "cuda": 16 * 2**30}
"""Memory that a chunk of users may take, by type of device, if users_at_once is not given."""
ROWS_AT_ONCE = {"cpu": 1, "cuda": 16}
"""The number of rows of a chunk is rounded up to a multiple of this: on a GPU each new number of rows is compiled
anew."""


@dataclass(frozen=True)
class VectorisedEngine:
    """The engine for any model: chunks of users through torch.func.vmap.

    Args:
        model: Any language model.
        device: "cpu" or "cuda".
        users_at_once: Users in a chunk; None: as many as fit `CHUNK_BYTES`. Without effect on a CPU.
        precision: The precision of products: bfloat16 (by autocast; the default on CUDA) or float32. Deltas, the clip
            and the sum are float32 or exact in either case.
    """

    ALONE_ON: ClassVar[tuple[str, ...]] = ("cpu",)
    """Types of devices on which users are processed one at a time, whatever `users_at_once` is."""
    model: LanguageModel
    device: torch.device = torch.device("cpu")
    users_at_once: int | None = None
    precision: str = "auto"
    _compiled: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls, model: LanguageModel, device: torch.device, users_at_once: int | None, precision: str
    ) -> "VectorisedEngine":
        """Make the engine for a model on a device (see `EngineClass.build`)."""
        return cls(model, device, users_at_once, precision)

    @classmethod
    def unsupported(cls, model: LanguageModel, precision: str) -> str | None:
        """Return None: every model is supported, in every precision (see `EngineClass.unsupported`)."""
        return None

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        """Sum the updates of many users at once on a GPU, of one per thread on a CPU (see `Engine.sum_updates`)."""
        params_P = params_P.to(self.device)
        self._choose(params_P)
        seed = int(rng.integers(2**63))
        if (packed := self._compiled.get("packed")) is not None:
            return packed.sum_updates(params_P, users, plan, seed)
        batches = [plan.update.batches(user, seed) for user in users]
        by_length = sorted(range(len(users)), key=lambda k: batches[k].shape, reverse=True)

        def chunk_sum(chunk: list[int]) -> CohortSum:
            """The sum of the contributions of one chunk of users."""
            unclipped_U = torch.ones(len(chunk), dtype=torch.bool, device=self.device) if plan.adaptive_clip else None
            delta_UP = self._deltas(params_P, [users[k] for k in chunk], [batches[k] for k in chunk], plan, unclipped_U)
            weight_units_U = plan.weights.units(np.array([len(users[k].tokens) for k in chunk]))
            return plan.contribution.of_users(delta_UP, weight_units_U, unclipped_U)

        chunks = list(self._chunks(by_length, batches))
        with one_thread_per_chunk(self.device) as run_all:
            return plan.contribution.sum(run_all(chunk_sum, chunks), self.model.layout.total)

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """Sum one cohort after the other (see `Engine.sum_cohorts`)."""
        return [self.sum_updates(c.params_P, c.users, c.plan, c.rng) for c in cohorts]

    def _chunks(self, by_length: list[int], batches: list[np.ndarray]) -> Iterator[list[int]]:
        """Divide users into chunks that fit into memory, and of which all batches have one size."""
        # DP: only batches of one size share a chunk. Products of another size round differently: filled up to the
        # largest in the chunk, one user would move what another adds.
        for _, alike in groupby(by_length, key=lambda k: batches[k].shape[1:]):
            users = list(alike)
            largest = self._chunk_size(batches[users[0]])
            # Chunks of one size, so that one compiled step serves them all.
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
        """delta_k of each user of a chunk, [U, P].

        `users` are sorted by descending steps: those not finished are the first rows.
        """
        # Batches of all of a user's data have other shapes in each cohort: compiling would take longer than it saves.
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
        # As tensors, so that one compiled step serves any learning rate and any S.
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
            # Rows of users who have finished, and padding rows, may be included; their results are not used.
            if at_work == len(users):
                delta_UP, scale_UJ = moved_UP, moved_scale_UJ
            else:
                delta_UP[:at_work].copy_(moved_UP[:at_work])
                scale_UJ[:at_work].copy_(moved_scale_UJ[:at_work])
        # The clip of the last step is left to the aggregation, which clips to the same balls.
        return delta_UP[: len(users)]

    def _step(self, *args: Any) -> tuple[Tensor, Tensor]:
        """One local step of a chunk; on CUDA compiled, if it can be."""
        if self.device.type == "cuda" and self._compiled.get("step") is not False:
            try:
                if "step" not in self._compiled:
                    torch.compiler.allow_in_graph(lstm_states)
                    self._compiled["step"] = torch.compile(self._local_step)
                return self._compiled["step"](*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # run without compilation: slower, with the same result
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
        """keep * delta - eta * gradient for each user, and the scale of its clip by ball.

        The clip is applied when the delta is next read, which saves a pass over memory. A model that projects after
        local steps does so before the clip.

        Args:
            theta0_P: The parameters at the beginning of the round.
            delta_UP: The users' deltas so far, before the clip of the last step.
            scale_UJ: The pending clip: the factor of each ball, 1 where nothing was clipped.
            window_UBW: One local batch of each user.
            features_UF: The users' features, if the model takes them.
            numbers: eta, 1 - eta * lambda, and the radii of the balls.
            balls: The start and end of each ball of the clip.
        """

        def loss(params: dict[str, Tensor], window_BW: Tensor, features_F: Tensor | None) -> Tensor:
            """The mean loss of one user on one batch."""
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
            # `where`, not min(1, S/norm): with a NaN the latter can come out as 1, which is no clip at all.
            scales.append(torch.where(norm_U > radius, radius / norm_U, 1.0))
        return moved_UP, torch.stack(scales, dim=1) if scales else scale_UJ

    def _gradients(
        self, loss: Callable[..., Tensor], layers: dict[str, Tensor], window_UBW: Tensor, features_UF: Tensor | None
    ) -> dict[str, Tensor]:
        """The gradient of each user's loss by that user's own parameters."""
        return (gradients_of_one_user if self._is_alone else gradients_of_users)(loss, layers, window_UBW, features_UF)

    def _choose(self, params_P: Tensor) -> None:
        """Decide, at the first round, whether users are processed one at a time."""
        if "alone" in self._compiled:
            return
        check_model(self.model, params_P)
        self._compiled["packed"] = self._packed(params_P)
        if self._compiled["packed"] is not None:
            self._compiled["alone"] = False
            return
        # DP: on a CPU every user has operations of their own. In one array with others it would matter who comes last:
        # torch computes an array's end by other code, where a sigmoid has another last bit.
        self._compiled["alone"] = self.device.type in self.ALONE_ON or not supports_vmap(self.model, params_P)

    def _packed(self, params_P: Tensor) -> "PackedCohorts | None":
        """The computation of Hugging Face models with users' tokens in one stream; None where it does not apply."""
        if self.device.type in self.ALONE_ON or not self._is_coarse or not hasattr(self.model, "store_module"):
            return None
        from unheard.engines.packed import PackedCohorts
        from unheard.models.packed import CannotPack

        packed = PackedCohorts(self.model, self.device, torch.bfloat16, users_at_once=self.users_at_once, say=_progress)
        try:
            packed.check(params_P)
            return packed
        except (CannotPack, RuntimeError, ModelError) as error:
            warnings.warn(f"This model trains more slowly, through vmap: {error}.", stacklevel=2)
            return None

    @property
    def _is_alone(self) -> bool:
        """Whether users are processed one at a time, without vmap.

        Decided once for all users: products of another shape round differently, and what one user adds must not depend
        on who else was drawn."""
        return self._compiled.get("alone", False)

    @property
    def _is_coarse(self) -> bool:
        """Whether products are computed in bfloat16."""
        return self.precision == "bfloat16" or (self.precision == "auto" and self.device.type == "cuda")

    def _features(self, users: list[User], rows: int) -> Tensor | None:
        if not self.model.user_features:
            return None
        known = np.stack([u.features for u in users if u.features is not None])
        return to_device(np.pad(known, ((0, rows - len(known)), (0, 0))), self.device)

    def _chunk_size(self, batches_SBW: np.ndarray) -> int:
        """How many users fit into a chunk.

        Each user needs about six copies of the parameters, four of the logits, and the model's activations.
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
    """A line on standard error about work that takes long and has no bar of its own."""
    print(f"unheard: {line}", file=sys.stderr, flush=True)


def _whole(rows: int, multiple: int) -> int:
    """Round a number of rows up to a multiple."""
    return -(-rows // multiple) * multiple
