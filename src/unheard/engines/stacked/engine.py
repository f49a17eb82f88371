"""The stacked engine: divides users into chunks, takes their local steps, and sums the deltas.

Input: cohorts, each with its own parameters, plan and users. Output: the sum of the clipped updates of each cohort.
Users are sorted by their number of local steps, so that a chunk holds users of similar length; no time is spent on
users who have finished. `Chunk.fill` writes the batches of a chunk's users and the settings of their runs into its
buffers (sizes.py), which are reused for later users. The steps are computed by plain.py on a CPU, and by the kernels of
kernels.py on CUDA. tests/agreement compares the engine with engines/reference.py.

The steps support the paper's models and three kinds of clip (`clip_kind`), and on CUDA batches of up to `LARGEST_BATCH`
positions. The engine delegates every other cohort to the engine for any model, engines/vectorised.py."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from unheard.engines.engine import Cohort, Drawn, SumsCohorts, one_thread_per_chunk
from unheard.engines.stacked.plain import PlainStep
from unheard.engines.stacked.sizes import Buffers, Sizes
from unheard.engines.vectorised import VectorisedEngine
from unheard.errors import InvalidValue
from unheard.mechanism.aggregation import CohortSum, has_kernels
from unheard.mechanism.plan import RoundPlan
from unheard.models.model import LanguageModel, window_targets
from unheard.models.recurrent import TiedGRU, TiedLSTM
from unheard.parameters import to_device
from unheard.updates.user_update import stacked_batches, token_counts

LARGEST_CHUNK = {"cpu": 2, "cuda": 2048}
"""The largest number of users in a chunk, by type of device. Larger chunks are not faster."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """The batches of the users of one cohort.

    Args:
        cohort: The index of the cohort in the call of `sum_cohorts`.
        windows_USBW: The windows of all users, from `stacked_batches` in updates/user_update.py.
        num_steps_U: The number of local steps of each user.
        num_tokens_U: The number of tokens of each user.
    """

    cohort: int
    windows_USBW: np.ndarray
    num_steps_U: np.ndarray
    num_tokens_U: np.ndarray

    def chosen(self, users: np.ndarray) -> np.ndarray:
        """Return the batches of some users: a view if the users are consecutive, else a copy."""
        if users[-1] - users[0] + 1 == len(users) and (np.diff(users) == 1).all():
            return self.windows_USBW[users[0] : users[-1] + 1]
        return self.windows_USBW[users]

    @classmethod
    def of(cls, c: int, cohort: Cohort) -> "Task":
        """Cut the text of a cohort's users into batches. `c` is the index of the cohort."""
        windows_USBW, num_steps_U = stacked_batches(cohort.plan.update, cohort.users, cohort.seed)
        return cls(c, windows_USBW, num_steps_U, token_counts(cohort.users))


Members = list[tuple[Task, np.ndarray]]
"""The users of a chunk, as pairs: the task of a cohort, and the indices of the cohort's users that are in the chunk (an
array, or one number). Pairs are in the order of the cohorts."""


@dataclass(frozen=True, repr=False)
class Chunk:
    """The buffers of a chunk of users, the step that works on them, and the key under which the engine keeps them.

    Args:
        key: The sizes of the buffers.
        buffers: The memory that the step works on.
        step: Takes a local step of all users of the chunk.
        written: The settings of the runs that are in the buffers. `fill` writes them only if they have changed.
    """

    key: tuple[int, ...]
    buffers: Buffers
    step: "PlainStep | KernelStep"  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    written: list[tuple[float, float, int, list[float]]] = field(default_factory=list)

    @torch.no_grad()
    def fill(self, cohorts: Sequence[Cohort], members: Members) -> int:
        """Write the users' batches and the settings of their runs into the buffers.

        Args:
            cohorts: All cohorts of the call. theta0 and the settings of each cohort are written.
            members: The users of this chunk.

        Returns:
            The largest number of local steps of a user of this chunk.

        Raises:
            InvalidValue: The steps cannot apply the clip.
        """
        b = self.buffers
        members = [(task, np.atleast_1d(users)) for task, users in members]
        device, U = b.delta_UP.device, sum(len(users) for _, users in members)
        if isinstance(self.step, PlainStep):
            # DP: the deltas of earlier users are cleared, so that every user's update begins at zero.
            b.delta_UP.zero_()
        b.square_UM.zero_()
        b.scale_UM.fill_(1)
        b.unclipped_U.fill_(1)
        b.step.zero_()
        b.num_steps_U.zero_()
        for r, cohort in enumerate(cohorts):
            b.theta0_RP[r].copy_(cohort.params_P)
        settings = [_clip_of(cohort.plan, b.sizes.M) for cohort in cohorts]
        if settings != self.written:
            tensors = (b.rate_R, b.keep_R, b.clip_kind_R, b.radius_RM)
            for tensor, values in zip(tensors, zip(*settings, strict=True), strict=True):
                tensor.copy_(to_device(np.array(values), device))
            self.written[:] = settings
        num_steps_U = np.concatenate([task.num_steps_U[users] for task, users in members])
        steps = int(num_steps_U.max(initial=0))
        if not isinstance(self.step, PlainStep) and (num_steps_U == 0).any():
            # DP: the kernels write the whole delta of a user in the first local step, without reading the memory. They
            # write nothing for a user without steps; the delta of a user who takes no step is zero, and is set here.
            b.delta_UP[to_device(np.flatnonzero(num_steps_U == 0), device)] = 0
        run_U = np.repeat([task.cohort for task, _ in members], [len(users) for _, users in members])
        numbers_2U = to_device(np.stack([num_steps_U, run_U]), device)
        b.num_steps_U[:U].copy_(numbers_2U[0])
        b.run_U[:U].copy_(numbers_2U[1])
        if b.sizes.F:
            features = [cohorts[task.cohort].users[k].features for task, users in members for k in users.tolist()]
            b.features_UF[:U].copy_(to_device(np.stack([f for f in features if f is not None]), device))
        row = 0
        for task, users in members:
            windows_USBW = to_device(task.chosen(users)[:, :steps], device)
            token, target, counts = window_targets(windows_USBW)
            here = (slice(0, windows_USBW.shape[1]), slice(row, row + len(users)))
            b.token_SUN[here].copy_(_by_time(token))
            b.target_SUN[here].copy_(_by_time(torch.where(counts, target, -1)))
            b.share_SU[here].copy_((1 / counts.sum(dim=(2, 3)).clamp(min=1).to(b.share_SU.dtype)).T)
            row += len(users)
        return steps


def _by_time(values_USBT: torch.Tensor) -> torch.Tensor:
    """Reorder [U, S, B, T] to [S, U, T * B], so that the positions of one time step are adjacent."""
    return values_USBT.permute(1, 0, 3, 2).flatten(2)


NONE, FLAT, PER_LAYER = 0, 1, 2
"""The kinds of clip that the steps can apply: no clip, one ball around the whole delta, one ball around each layer."""


def clip_kind(plan: RoundPlan) -> int | None:
    """Return whether the plan's clip is `NONE`, `FLAT` or `PER_LAYER`, judged by its balls; None for any other clip."""
    balls, layout = plan.contribution.balls, plan.layout
    if not balls:
        return NONE if math.isinf(plan.contribution.l2_bound) else None
    where = [(ball.where.start, ball.where.stop) for ball in balls]
    if where == [(0, layout.total)]:
        return FLAT
    if where == [(layer.start, layer.stop) for layer in layout.slices.values()]:
        return PER_LAYER
    # DP: a clip that the kernels do not support is never treated as no clip.
    return None


def _clip_of(plan: RoundPlan, M: int) -> tuple[float, float, int, list[float]]:
    """Return the settings of a run for the buffers: eta, 1 - eta * lambda, the kind of clip, a radius for each layer.

    Args:
        plan: The plan of the round.
        M: The number of layers.

    Raises:
        InvalidValue: The steps cannot apply the clip.
    """
    eta = plan.update.learning_rate
    kind = clip_kind(plan)
    if kind is None:
        raise InvalidValue(
            f"The engine 'stacked' cannot apply the clip '{plan.clip}' after local steps. Use 'vectorised'."
        )
    radii = [ball.radius for ball in plan.contribution.balls]
    return eta, 1 - eta * plan.update.update_penalty, kind, radii * M if kind == FLAT else radii or [0.0] * M


@dataclass(frozen=True)
class StackedEngine(SumsCohorts):
    """The engine for `TiedLSTM` and `TiedGRU`. It computes the local steps of a chunk of users at once.

    Args:
        model: The paper's model, with a known vocabulary size.
        device: "cpu" or "cuda".
        users_at_once: The number of users in a chunk. None: as many as fit into memory, up to `LARGEST_CHUNK`.
        precision: The precision of deltas and of products within a user's local steps: "float32", "bfloat16",
            "float64", or "auto" (bfloat16 on CUDA, else that of the parameters). On a CPU deltas are float32 even with
            "bfloat16". The clip of the returned delta and the sum are exact in any precision.
    """

    model: LanguageModel
    device: torch.device = torch.device("cpu")
    users_at_once: int | None = None
    precision: str = "auto"
    _idle: dict[tuple[int, ...], list[Chunk]] = field(default_factory=dict, compare=False, repr=False)
    _sizes: dict[tuple[int, ...], int] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def unsupported(cls, model: LanguageModel, precision: str) -> str | None:
        """Return the reason why the model is not supported, else None (see `EngineClass.unsupported`).

        `TiedLSTM` and `TiedGRU` are supported, unless they project word vectors after local steps.
        """
        if isinstance(model, TiedLSTM | TiedGRU) and model.projects_locally:
            return (
                "The engine 'stacked' does not project word vectors after local steps (model.step_norm). "
                "Use 'vectorised' or 'auto'."
            )
        if isinstance(model, TiedLSTM | TiedGRU):
            return None
        return f"The engine 'stacked' is for the paper's models, not for {type(model).__name__}. Use 'vectorised' or 'auto'."

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """Return the sum of each cohort (see `Engine.sum_cohorts`).

        Users of several cohorts may be in one chunk. Each delta is added to the sum of the user's own cohort.
        """
        if any(cohort.plan.update.batch_size is None for cohort in cohorts):
            # DP: a batch of all of a user's data has a size of its own, and products of another size round differently:
            # if batches were padded to the largest of the chunk, another user would change a user's contribution.
            return [self._delegate(cohort) for cohort in cohorts]
        if any(clip_kind(cohort.plan) is None for cohort in cohorts):
            # The steps cannot apply this clip; the engine for any model can.
            return [self._delegate(cohort) for cohort in cohorts]
        tasks = [Task.of(c, cohort) for c, cohort in enumerate(cohorts)]
        shapes = {task.windows_USBW.shape[2:] for task in tasks}
        if len(shapes) > 1 or not self._fits(next(iter(shapes))):
            return [self._delegate(cohort) for cohort in cohorts]
        dtype = self._dtype(cohorts[0])

        def chunk_sums(members: Members) -> list[tuple[int, CohortSum]]:
            return self._chunk_sums(cohorts, members, dtype)

        totals: dict[int, CohortSum] = {}
        with one_thread_per_chunk(self.device) as run_all:
            for sums in run_all(chunk_sums, list(self._chunks(tasks, dtype))):
                for c, part in sums:  # added immediately: the sums of all chunks together would fill the memory
                    totals[c] = cohorts[c].plan.contribution.add(totals.get(c), part)
        nobody = self.model.layout.total
        return [totals.get(c) or cohort.plan.contribution.sum([], nobody) for c, cohort in enumerate(cohorts)]

    @property
    def _is_coarse_on_cpu(self) -> bool:
        """Whether a CPU computes products in bfloat16. Deltas are float32 then."""
        return self.precision == "bfloat16" and self.device.type == "cpu"

    def _dtype(self, cohort: Cohort) -> torch.dtype:
        """Return the type of deltas in the buffers."""
        if self._is_coarse_on_cpu:
            return torch.float32
        if self.precision != "auto":
            return PRECISIONS[self.precision]
        if self.device.type == "cuda":
            return torch.bfloat16
        return cohort.params_P.dtype

    def _fits(self, batch: tuple[int, ...]) -> bool:
        """Whether the step can compute batches of this shape [B, W] on this device. Larger batches are delegated."""
        if self.device.type != "cuda":
            return True
        if not has_kernels(self.device):
            return False
        from unheard.engines.stacked.kernels import LARGEST_BATCH, LARGEST_WIDTH

        sizes = Sizes.of(self.model, batch[0], batch[1] - 1)
        return sizes.N <= LARGEST_BATCH and max(sizes.X, sizes.H) <= LARGEST_WIDTH

    def _delegate(self, cohort: Cohort) -> CohortSum:
        """Return the sum of a cohort, computed by the engine for any model."""
        return self._any_model.sum_updates(cohort.params_P, cohort.users, cohort.plan, Drawn(cohort.seed))

    @cached_property
    def _any_model(self) -> VectorisedEngine:
        """The engine for cohorts that the steps do not support. It is kept for all rounds, with its compiled code."""
        return VectorisedEngine(self.model, self.device, self.users_at_once, self.precision)

    def _chunks(self, tasks: list[Task], dtype: torch.dtype) -> Iterator[Members]:
        """Yield chunks of nearly equal size that fit into memory. Users of similar length share a chunk."""
        counts = [len(task.num_steps_U) for task in tasks]
        if not sum(counts):
            return
        shape = (*tasks[0].windows_USBW.shape[1:], dtype.itemsize)
        if shape not in self._sizes:
            self._sizes[shape] = self._users_that_fit(tasks[0].windows_USBW.shape, dtype)
        size = self.users_at_once or self._sizes[shape]
        by_length = np.argsort(-np.concatenate([task.num_steps_U for task in tasks]), kind="stable")
        cohort_N = np.repeat(np.arange(len(tasks)), counts)
        user_N = np.concatenate([np.arange(count) for count in counts])
        for chunk in np.array_split(by_length, -(-len(by_length) // size)):
            chunk.sort()  # Indices run over the cohorts in order, so this groups users by cohort.
            present, first = np.unique(cohort_N[chunk], return_index=True)
            users = np.split(user_N[chunk], first[1:])
            yield [(tasks[c], chosen) for c, chosen in zip(present.tolist(), users, strict=True)]

    def _users_that_fit(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the number of users for whom 60 % of the available memory is enough, at most `LARGEST_CHUNK`.

        Available is memory that is free, that torch has reserved and does not use, or that idle chunks occupy.

        Args:
            shape: The shape of `Task.windows_USBW`.
            dtype: The type of deltas.
        """
        largest = LARGEST_CHUNK[self.device.type]
        if self.device.type != "cuda":
            return largest
        _, S, B, W = shape
        s = Sizes.of(self.model, B, W - 1)
        activations = s.N * (s.X + 6 * s.H + 4 * s.D) * 6 + 4 * s.N * s.D * 4
        bytes_a_user = (s.P + s.middle) * dtype.itemsize + activations + 2 * S * s.N * 4
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        mine = sum(chunk.buffers.U for idle in self._idle.values() for chunk in idle) * bytes_a_user
        return max(1, min(largest, int(0.6 * (free + held + mine)) // bytes_a_user))

    def _chunk_sums(
        self, cohorts: Sequence[Cohort], members: Members, dtype: torch.dtype
    ) -> list[tuple[int, CohortSum]]:
        """Compute the updates of one chunk. Return the index and the sum of each cohort that has users in the chunk."""
        chunk = self._take_chunk(members, dtype, len(cohorts))
        steps = chunk.fill(cohorts, members)
        chunk.step.run(steps)
        sums, row = [], 0
        for task, users in members:
            plan, rows = cohorts[task.cohort].plan, slice(row, row + len(users))
            weight_units_U = plan.weights.units(task.num_tokens_U[users])
            unclipped_U = chunk.buffers.unclipped_U[rows] if plan.adaptive_clip else None
            # The CUDA kernels also compute squared norms: one of the whole delta, or one of each layer.
            balls = len(plan.contribution.balls)
            square_UJ = chunk.buffers.square_UM[rows, :balls] if chunk.step.knows_squares else None
            total = plan.contribution.of_users(chunk.buffers.delta_UP[rows], weight_units_U, unclipped_U, square_UJ)
            sums.append((task.cohort, total))
            row += len(users)
        self._idle[chunk.key].append(chunk)
        return sums

    def _take_chunk(self, members: Members, dtype: torch.dtype, R: int) -> Chunk:
        """Return an idle chunk with capacity for the members, or a new one.

        Capacities are rounded up, so that cohorts of similar size reuse the same chunk.

        Args:
            members: The users.
            dtype: The type of deltas.
            R: The number of runs.
        """
        _, B, W = members[0][0].windows_USBW.shape[1:]
        S = max(task.windows_USBW.shape[1] for task, _ in members)
        U = sum(np.size(users) for _, users in members)
        if self.device.type == "cuda":
            multiple = 32 if U <= 256 else 64
            U = -(-U // multiple) * multiple
        key = (U, -(-max(S, 1) // 8) * 8, R, B, W, dtype.itemsize)
        waiting = self._idle.setdefault(key, [])
        if waiting:
            return waiting.pop()
        if self.device.type == "cuda":  # Free the memory of chunks of other sizes.
            for other, idle in self._idle.items():
                if other != key and len(self._idle) > 4:
                    idle.clear()
        sizes = Sizes.of(self.model, B, W - 1)
        buffers = Buffers.allocate(sizes, U=key[0], S=key[1], R=R, device=self.device, dtype=dtype)
        if self.device.type == "cuda":
            from unheard.engines.stacked.kernels import KernelStep

            return Chunk(key, buffers, KernelStep(buffers))
        return Chunk(key, buffers, PlainStep(buffers, self._is_coarse_on_cpu))
