"""A chunk of users: fills the buffers that the steps work on with users' batches and the settings of their runs.

Input: cohorts, and which users of each belong to the chunk. Output: filled `Buffers`. The memory of a chunk is reused
for the next users; everything of the users before is overwritten.

`clip_kind` states which clips the steps can apply. The engine delegates plans with any other clip; `Chunk.fill` raises
for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unheard.engines.engine import Cohort
from unheard.engines.stacked.plain import PlainStep
from unheard.engines.stacked.sizes import Buffers
from unheard.errors import InvalidValue
from unheard.mechanism.plan import RoundPlan
from unheard.models.model import window_targets
from unheard.parameters import to_device
from unheard.updates.user_update import stacked_batches, token_counts


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """The batches of one cohort's users: `cohort` is its number in the call, `windows_USBW` and `num_steps_U` are as
    from updates/user_update.py, and `num_tokens_U` is how many tokens each user has."""

    cohort: int
    windows_USBW: np.ndarray
    num_steps_U: np.ndarray
    num_tokens_U: np.ndarray

    def chosen(self, users: np.ndarray) -> np.ndarray:
        """The batches of some users: a view if the users are consecutive, else a copy."""
        if users[-1] - users[0] + 1 == len(users) and (np.diff(users) == 1).all():
            return self.windows_USBW[users[0] : users[-1] + 1]
        return self.windows_USBW[users]

    @classmethod
    def of(cls, c: int, cohort: Cohort) -> "Task":
        """The windows and step counts of a cohort's users. `c` is the index of the cohort."""
        windows_USBW, num_steps_U = stacked_batches(cohort.plan.update, cohort.users, cohort.seed)
        return cls(c, windows_USBW, num_steps_U, token_counts(cohort.users))


Members = list[tuple[Task, np.ndarray]]
"""The users of a chunk: the task of each cohort that has users in it, in the order of the cohorts, and the users'
numbers within that cohort (an array, or one number)."""


@dataclass(frozen=True, repr=False)
class Chunk:
    """Buffers, the step that works on them, and the key under which the engine keeps them for reuse."""

    key: tuple[int, ...]
    buffers: Buffers
    step: "PlainStep | KernelStep"  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    @torch.no_grad()
    def fill(self, cohorts: Sequence[Cohort], members: Members) -> int:
        """Writes users into the buffers. Returns the largest number of local steps.

        Args:
            cohorts: all cohorts of the call; theta0 and settings of each are written.
            members: the users of this chunk.

        Raises:
            InvalidValue: for a clip that the steps cannot apply.
        """
        b = self.buffers
        members = [(task, np.atleast_1d(users)) for task, users in members]
        device, U = b.delta_UP.device, sum(len(users) for _, users in members)
        if isinstance(self.step, PlainStep):
            # DP: nothing of those who were here before is left: a user's update begins at zero, whoever came first.
            b.delta_UP.zero_()
        b.square_UM.zero_()
        b.scale_UM.fill_(1)
        b.unclipped_U.fill_(1)
        b.step.zero_()
        b.num_steps_U.zero_()
        for r, cohort in enumerate(cohorts):
            b.theta0_RP[r].copy_(cohort.params_P)
        rate, keep, kind, radius = zip(*(_clip_of(cohort.plan, b.sizes.M) for cohort in cohorts), strict=True)
        for tensor, values in ((b.rate_R, rate), (b.keep_R, keep), (b.clip_kind_R, kind), (b.radius_RM, radius)):
            tensor.copy_(to_device(np.array(values), device))
        num_steps_U = np.concatenate([task.num_steps_U[users] for task, users in members])
        steps = int(num_steps_U.max(initial=0))
        if not isinstance(self.step, PlainStep) and (num_steps_U == 0).any():
            # DP: the kernels write the whole delta of a user in the first local step, without reading what was there; the
            # delta of a user who takes no step is zero.
            b.delta_UP[to_device(np.flatnonzero(num_steps_U == 0), device)] = 0
        b.num_steps_U[:U].copy_(to_device(num_steps_U, device))
        b.run_U[:U].copy_(
            to_device(np.concatenate([np.full(len(users), task.cohort) for task, users in members]), device)
        )
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
    """[U, S, B, T] -> [S, U, T * B]: the positions of one time step are adjacent."""
    return values_USBT.permute(1, 0, 3, 2).flatten(2)


NONE, FLAT, PER_LAYER = 0, 1, 2
"""The clips that the kernels can apply after a local step: none, one ball around the whole delta, one ball around each
layer."""


def clip_kind(plan: RoundPlan) -> int | None:
    """Which of those three the plan's clip is, by the balls that it consists of; None for any other clip."""
    balls, layout = plan.contribution.balls, plan.layout
    if not balls:
        return NONE if math.isinf(plan.contribution.l2_bound) else None
    where = [(ball.where.start, ball.where.stop) for ball in balls]
    if where == [(0, layout.total)]:
        return FLAT
    if where == [(layer.start, layer.stop) for layer in layout.slices.values()]:
        return PER_LAYER
    # DP: a clip that the kernels do not know is never taken for no clip.
    return None


def _clip_of(plan: RoundPlan, M: int) -> tuple[float, float, int, list[float]]:
    """The settings of a run as the buffers hold them: eta, 1 - eta * lambda, the kind of clip, a radius for each
    layer."""
    eta = plan.update.learning_rate
    kind = clip_kind(plan)
    if kind is None:
        raise InvalidValue(
            f"The engine 'stacked' cannot apply the clip '{plan.clip}' after local steps. Use 'vectorised'."
        )
    radii = [ball.radius for ball in plan.contribution.balls]
    return eta, 1 - eta * plan.update.update_penalty, kind, radii * M if kind == FLAT else radii or [0.0] * M
