"""Sums the updates of a cohort for a Hugging Face model, with the windows of many users in one stream of tokens.

The engine `vectorised` uses this module on a GPU. A stream has C places. A user occupies one place until the last local
step; then the next user takes the place. Streams therefore stay full although users have different amounts of text. A
batch that does not fit into the rest of a stream continues in the next stream; the gradients of its parts are added
before the local step is taken.

Every step has the same shapes (`StreamSize`), so it is compiled once, and on CUDA recorded as one graph. The number of
tokens of a stream is chosen by a measurement of memory. If memory runs out nevertheless, that number is halved, and the
users who had not finished start again from the parameters of the round. Each user is still counted exactly once.

    packed = PackedCohorts(model, device, torch.bfloat16)
    total = packed.sum_updates(params_P, users, plan, seed)
"""

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unheard.errors import ModelError
from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.sampling import ExampleSampling
from unheard.models.model import BOS, PAD
from unheard.models.packed import CannotPack, PackedModel, Stream, StreamSize, fast_score_gradient
from unheard.parameters import host_memory, to_device
from unheard.updates.user_update import User, token_counts

TOKENS_AT_ONCE = 2**15
"""The largest number of tokens of a stream. Longer streams are not faster."""
SHARE_OF_MEMORY = 0.7
"""The share of the free memory that the activations of a stream may take. The memory that a stream needs is estimated
from a measurement of a short stream."""
LARGE_DELTAS = 2**29
"""If the deltas of all users together have at least this number of coordinates, local steps are taken one user at a
time."""
LARGEST_DIFFERENCE = 0.1
"""The largest relative difference between the scores of the packed computation and those of the model itself."""
SMALLEST_STREAM = 2048
"""If fewer tokens than this fit into memory, activations are not kept but computed again in the backward pass."""
PLACES = 4
"""The number of places per full batch that fits into a stream, with LoRA. It is above 1 because many users have less
text than a full batch."""
STEPS_KEPT = 2
"""The number of compiled steps that are kept. Runs that are trained together may have plans of two shapes."""


@dataclass(repr=False)
class _Batch:
    """The windows of one local batch, flattened to L tokens.

    Args:
        row_L: The model's row number of each input token.
        target_L: The row number of each next token.
        weight_L: The weight of each target in the mean loss of the batch.
        position_L: The position of each token in its window.
        lengths: The number of tokens of each window.
    """

    row_L: np.ndarray
    target_L: np.ndarray
    weight_L: np.ndarray
    position_L: np.ndarray
    lengths: list[int]

    @classmethod
    def of(cls, window_BW: np.ndarray, row_V: np.ndarray, is_said_V: np.ndarray) -> "_Batch":
        """Flatten the windows of a local batch, without the padding at the end of each window.

        Args:
            window_BW: Token ids of the store.
            row_V: The model's row number of each token id.
            is_said_V: Whether each token id has an output row of its own.
        """
        input_BT, target_BT = window_BW[:, :-1], window_BW[:, 1:]
        is_here_BT = (input_BT != PAD) & (target_BT != PAD)
        lengths_B = np.where(is_here_BT.any(1), is_here_BT.shape[1] - is_here_BT[:, ::-1].argmax(1), 0)
        kept_BT = np.arange(is_here_BT.shape[1]) < lengths_B[:, None]
        counts_L = (is_here_BT & (target_BT != BOS))[kept_BT]
        target_L = np.maximum(target_BT[kept_BT], 0)
        # A target without an output row of its own counts in the denominator of the mean, but has no gradient.
        weight_L = (counts_L & is_said_V[target_L]).astype(np.float32) / np.float32(max(int(counts_L.sum()), 1))
        positions_BT = np.broadcast_to(np.arange(is_here_BT.shape[1]), is_here_BT.shape)
        row_L = row_V[np.maximum(input_BT[kept_BT], 0)]
        return cls(row_L, row_V[target_L], weight_L, positions_BT[kept_BT], [int(n) for n in lengths_B if n])


@dataclass
class _Work:
    """The progress of one user in the local steps of a round. A stream has one place for each such user."""

    user: int
    """The index of the user in the cohort."""
    tokens: int
    """The number of tokens of the user."""
    cut: Callable[[], Iterable[np.ndarray]]
    """Returns the user's batches."""
    step: int = 0
    """The number of local steps taken."""
    window: int = 0
    """The number of windows of the current batch that are done."""
    token: int = 0
    """The number of tokens of the current batch that are done."""
    batch: _Batch | None = None
    """The current batch; None before its first window is needed."""
    is_finished: bool = False
    """Whether all local steps are taken."""

    @cached_property
    def batches(self) -> list[np.ndarray]:
        """The user's batches, computed at the first access, so that the first stream of a cohort can start early."""
        return list(self.cut())


@dataclass(repr=False)
class _HostStream:
    """One stream in host memory, as one array of 32-bit numbers, so that a single copy transfers it to the device.

    Args:
        size: The shapes of the stream.
        numbers: The array.
        parts: Views of the array, by the names of `layout`.
    """

    size: StreamSize
    numbers: Tensor
    parts: dict[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def layout(size: StreamSize, balls: int) -> dict[str, tuple[int, type]]:
        """Return the length and the type of each part of the array, in order.

        Args:
            size: The shapes of the stream.
            balls: The number of balls of the clip.
        """
        return {
            "row_N": (size.tokens, np.int32),
            "position_N": (size.tokens, np.int32),
            "target_N": (size.tokens, np.int32),
            "weight_N": (size.tokens, np.float32),
            "ends_M": (size.windows + 1, np.int32),
            "span_2C": (2 * size.users, np.int32),
            "is_complete_C": (size.users, np.int32),
            "settings": (2 + balls, np.float32),
        }

    @classmethod
    def empty(cls, size: StreamSize, balls: int, device: torch.device) -> "_HostStream":
        """Allocate a stream that consists of padding."""
        layout = cls.layout(size, balls)
        numbers = host_memory((sum(count for count, _ in layout.values()),), torch.int32, device)
        numbers.zero_()
        start, parts, array = 0, {}, numbers.numpy()
        for name, (count, dtype) in layout.items():
            parts[name] = array[start : start + count].view(dtype)
            start += count
        parts["ends_M"][:] = np.minimum(np.arange(size.windows + 1) * size.longest, size.tokens)
        return cls(size, numbers, parts)


class _Step:
    """One step on buffers of fixed shapes: computes the gradients of a stream, and then takes local steps.

    A local step is taken for each user whose batch is complete.

    Args:
        packed: The model.
        balls: The start and end of each ball of the clip.
        is_compiled: Whether the local step is compiled.
    """

    def __init__(self, packed: PackedModel, balls: tuple[tuple[int, int], ...], *, is_compiled: bool) -> None:
        self.packed, self.balls = packed, balls
        size, device, P = packed.size, packed.device, packed.layout.total
        dtype = torch.float64 if packed.dtype == torch.float64 else torch.float32
        self.host = [_HostStream.empty(size, len(balls), device) for _ in range(3 if device.type == "cuda" else 1)]
        self._copied: list[Any] = [None] * len(self.host)
        self.numbers = self.host[0].numbers.to(device, copy=True)
        self.theta0_P = torch.zeros(P, dtype=dtype, device=device)
        self.delta_CP = torch.zeros(size.users, P, dtype=dtype, device=device)
        self.gradient_CP = torch.zeros(size.users, P, dtype=dtype, device=device)
        self.was_clipped_C = torch.zeros(size.users, dtype=torch.bool, device=device)
        self._take: Callable[..., None] = _take_local_step
        if is_compiled:
            self._take = torch.compile(_take_local_step, dynamic=False)
        self.graph: Any = None
        self._turn = 0

    def next_host(self) -> _HostStream:
        """Return the host memory for the next stream, after the last copy from it to the device has ended."""
        self._turn = (self._turn + 1) % len(self.host)
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        return self.host[self._turn]

    def run(self, stream: _HostStream) -> None:
        """Copy a stream to the device and compute its step, by replaying the CUDA graph if there is one."""
        self.numbers.copy_(stream.numbers, non_blocking=True)
        if self.packed.device.type == "cuda":
            self._copied[self._turn] = torch.cuda.Event()
            self._copied[self._turn].record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.compute()

    def record(self) -> None:
        """Record the step as a CUDA graph. The deltas stay zero, because the stream in the buffers is still padding."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.compute()
        self.graph = graph

    def compute(self) -> None:
        """Compute the gradients of the stream, and take the local step of each user whose batch is complete."""
        parts, start = {}, 0
        for name, (count, dtype) in _HostStream.layout(self.packed.size, len(self.balls)).items():
            part = self.numbers[start : start + count]
            parts[name] = part.view(torch.float32) if dtype is np.float32 else part
            start += count
        stream = Stream(
            parts["row_N"].long(),
            parts["position_N"].long(),
            parts["target_N"].long(),
            parts["weight_N"],
            parts["ends_M"],
            parts["span_2C"].view(2, -1),
        )
        with torch.no_grad():
            for name, leaf in self.packed.leaves.items():
                part = self.packed.layout.slices[name]
                torch.add(self.theta0_P[part], self.delta_CP[:, part], out=leaf.view(len(leaf), -1))
        gradients = self.packed.gradients(stream)
        with torch.no_grad():
            if self.packed.size.is_shared:
                self.gradient_CP += torch.cat([gradients[name].flatten(1) for name in self.packed.layout.names], dim=1)
            else:  # layer by layer: joined gradients would need as much memory again
                for name, part in self.packed.layout.slices.items():
                    self.gradient_CP[:, part] += gradients.pop(name).flatten(1)
            is_complete_C = parts["is_complete_C"].bool()
            # Large deltas are processed one user at a time: a kernel over all users compiles slowly and needs memory.
            at_once = len(self.delta_CP) if self.delta_CP.numel() < LARGE_DELTAS else 1
            for first in range(0, len(self.delta_CP), at_once):
                some = slice(first, first + at_once)
                users = (self.delta_CP[some], self.gradient_CP[some], self.was_clipped_C[some], is_complete_C[some])
                self._take(*users, parts["settings"], self.balls)


def _take_local_step(
    delta_CP: Tensor,
    gradient_CP: Tensor,
    was_clipped_C: Tensor,
    is_complete_C: Tensor,
    settings: Tensor,
    balls: tuple[tuple[int, int], ...],
) -> None:
    """Take the local step of each user whose batch is complete: delta <- Clip(keep * delta - eta * gradient), in place.

    Args:
        delta_CP: The users' deltas so far.
        gradient_CP: The gradients of the users' batches. Set to zero for users whose batch is complete.
        was_clipped_C: Whether a step of each user was clipped so far. Set to True where this step is clipped.
        is_complete_C: Whether each user's batch is complete.
        settings: eta, keep = 1 - eta * lambda, and the radii of the balls.
        balls: The start and end of each ball of the clip.
    """
    is_complete_C1 = is_complete_C[:, None]
    for number, (start, stop) in enumerate(balls):
        moved_CL = settings[1] * delta_CP[:, start:stop] - settings[0] * gradient_CP[:, start:stop]
        norm_C1 = torch.linalg.vector_norm(moved_CL, dim=1, keepdim=True)
        radius = settings[2 + number]
        # `where` instead of min(1, S / norm): for a NaN the minimum could be 1, and the delta would not be clipped.
        moved_CL = moved_CL * torch.where(norm_C1 > radius, radius / norm_C1, 1.0)
        was_clipped_C |= is_complete_C & (norm_C1[:, 0] > radius)
        delta_CP[:, start:stop] = torch.where(is_complete_C1, moved_CL, delta_CP[:, start:stop])
    gradient_CP.masked_fill_(is_complete_C1, 0.0)


class PackedCohorts:
    """Sums cohorts for a Hugging Face model, with the users' windows packed into streams.

    Call `check` before the first cohort: it raises `CannotPack` for a model that cannot be packed.

    Args:
        model: A `HuggingFaceModel`.
        device: "cuda"; "cpu" for tests.
        dtype: The type in which products are computed.
        users_at_once: The largest number of places. None: chosen from the number of tokens of a stream.
        tokens_at_once: N, the number of tokens of a stream. None: chosen by a measurement of memory.
        is_compiled: Whether layers are compiled and steps recorded as a CUDA graph. Without effect on a CPU.
        say: Called with lines about the progress of compilation.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        dtype: torch.dtype,
        *,
        users_at_once: int | None = None,
        tokens_at_once: int | None = None,
        is_compiled: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.users_at_once, self.tokens_at_once = users_at_once, tokens_at_once
        self.is_compiled = is_compiled and device.type == "cuda"
        self.say = say or (lambda line: None)
        module = model.store_module
        self.row_V = module.get_buffer("row_V").cpu().numpy()
        self.is_said_V = module.get_buffer("is_said_V").cpu().numpy()
        self._steps: dict[Any, _Step] = {}
        self._limit: int | None = tokens_at_once
        self.is_recomputed = False

    def check(self, params_P: Tensor) -> None:
        """Check that the packed computation gives the scores of the model itself, on one short artificial stream.

        Also computes the gradients of the stream once, so that a kernel that does not compile here fails now.

        Raises:
            CannotPack: A layer of the model cannot be packed, the scores differ by more than
                `LARGEST_DIFFERENCE`, or a gradient is not finite.
        """
        size = StreamSize(tokens=32, block=16, users=2, windows=4, longest=16, is_shared=self.model.train == "lora")
        packed = PackedModel(self.model.store_module, self.model.layout, size, self.device, self.dtype)
        packed.load(params_P.expand(2, -1))
        token_N = torch.arange(32, device=self.device) * 7 % len(self.row_V)
        row_V = torch.as_tensor(self.row_V, device=self.device)
        position_N = torch.arange(32, device=self.device) % 8
        ends_M = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32, device=self.device)
        span_2C = torch.tensor([[0, 16], [16, 32]], dtype=torch.int32, device=self.device)
        weight_N = torch.full((32,), 1 / 16, device=self.device)
        stream = Stream(row_V[token_N], position_N, row_V[token_N.roll(-1)], weight_N, ends_M, span_2C)
        scores_NR = packed.packed_logits(stream).float()
        with torch.no_grad():
            logits_BTV = self.model.logits(self.model.layout.split(params_P), token_N.view(4, 8), None)
        said_V = torch.as_tensor(self.is_said_V, device=self.device)
        given = scores_NR[:, row_V][:, said_V]
        expected = logits_BTV.reshape(32, -1)[:, said_V].float()
        error = (given - expected).norm() / expected.norm()
        if not error < LARGEST_DIFFERENCE:
            raise CannotPack(f"its packed scores differ from the model's own (relative difference {float(error):.2g})")
        if not all(gradient.isfinite().all() for gradient in packed.gradients(stream).values()):
            raise CannotPack("its packed gradients are not finite")

    # ------------------------------------------------------------------------------------------ a cohort

    def sum_updates(self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, seed: int) -> CohortSum:
        """Return the sum over users of w_k * Clip(delta_k), as `Engine.sum_updates` does.

        Args:
            params_P: The parameters at the beginning of the round.
            users: The cohort; may be empty.
            plan: The plan of the round.
            seed: The seed of FedSGD's batches.

        Raises:
            ModelError: One window of one user does not fit into memory.
        """
        return plan.contribution.sum(self._finished(params_P, users, plan, seed), self.model.layout.total)

    def _finished(self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, seed: int) -> Iterator[CohortSum]:
        """Compute the updates of all users. Yield a sum each time that one or more users finish."""
        # The batches of a user are cut when the user enters a stream, while the GPU computes earlier streams.
        step = self._started(plan, params_P)
        num_tokens_U = token_counts(users)
        waiting = _users_by_length(num_tokens_U, is_shared=step.packed.size.is_shared)
        places: list[_Work | None] = [None] * step.packed.size.users
        while waiting or any(places):
            for place, work in enumerate(places):
                if work is None and waiting:
                    k = waiting.pop()
                    places[place] = _Work(k, int(num_tokens_U[k]), lambda k=k: plan.update.batches(users[k], seed))
            total: CohortSum | None = None
            try:
                host = step.next_host()
                taken = self._fill(host, places, plan)
                step.run(host)
                self._advance(places, taken)
                done = [place for place, work in enumerate(places) if work is not None and work.is_finished]
                if done:
                    who = [places[place].user for place in done]  # pyright: ignore
                    total = self._contribution(step, done, num_tokens_U[who], plan)
            except torch.OutOfMemoryError:
                done = None
            if done is None:  # Not inside `except`: the error's traceback would keep the activations in memory.
                size = step.packed.size
                del step
                self._halve(size, plan)
                step = self._started(plan, params_P)
                # The step may have failed halfway, so unfinished users start again from deltas of zero.
                waiting += [work.user for work in places if work is not None]
                places = [None] * step.packed.size.users
                continue
            if total is not None:
                yield total
            for place in done:
                places[place] = None

    def _started(self, plan: RoundPlan, params_P: Tensor) -> _Step:
        """Return the step for this plan, loaded with the parameters of the round, and with deltas of zero."""
        step = self._step_for(plan)
        step.theta0_P.copy_(params_P)
        step.delta_CP.zero_()
        step.gradient_CP.zero_()
        step.was_clipped_C.zero_()
        return step

    def _contribution(self, step: _Step, done: list[int], num_tokens_U: np.ndarray, plan: RoundPlan) -> CohortSum:
        """Return the sum of the clipped updates of the users who have finished, and set their rows to zero.

        Args:
            step: The step that holds the deltas.
            done: The places of these users.
            num_tokens_U: The number of tokens of each of these users.
            plan: The plan of the round.
        """
        done_D = to_device(np.array(done, dtype=np.int64), self.device)
        delta_UP = step.delta_CP.index_select(0, done_D)
        unclipped_U = ~step.was_clipped_C.index_select(0, done_D) if plan.adaptive_clip else None
        weight_units_U = plan.weights.units(num_tokens_U)
        total = plan.contribution.of_users(delta_UP, weight_units_U, unclipped_U)
        # DP: the row of a finished user is set to zero before the next user gets it; nothing of one user is in the delta
        # of another.
        step.delta_CP.index_fill_(0, done_D, 0.0)
        step.gradient_CP.index_fill_(0, done_D, 0.0)
        step.was_clipped_C.index_fill_(0, done_D, False)
        return total

    # ------------------------------------------------------------------------------------------ a stream

    def _fill(self, host: _HostStream, places: list[_Work | None], plan: RoundPlan) -> dict[int, tuple[int, int, bool]]:
        """Write the next windows of the users into a stream.

        Where users share a stream (LoRA), the users with the most local steps left come first. Otherwise a few users
        with many steps would remain at the end of a cohort, and the last streams would be almost empty.

        Args:
            host: The stream to write to.
            places: The user at each place; None for an empty place.
            plan: The plan of the round.

        Returns:
            For each place that has windows in this stream: how many windows and how many tokens of the user's current
            batch are done after this stream, and whether the batch is complete.
        """
        size, parts = host.size, host.parts
        for name in ("row_N", "position_N", "target_N", "weight_N", "span_2C", "is_complete_C"):
            parts[name].fill(0)
        eta = plan.update.learning_rate
        radii = [ball.radius for ball in plan.contribution.balls] or [math.inf]
        parts["settings"][:] = [eta, 1 - eta * plan.update.update_penalty, *radii]
        taken: dict[int, tuple[int, int, bool]] = {}
        ends, cursor = [0], 0
        order = [(place, work) for place, work in enumerate(places) if work is not None]
        if size.is_shared:
            per_step = plan.update.unroll * (_windows_per_batch(plan) or 1)
            order.sort(key=lambda pair: pair[1].step - -(-(pair[1].tokens - 1) // per_step))
        for place, work in order:
            # The first window of a new user does not fit: skip the user before the batches are cut.
            if work.step == work.window == 0 and min(work.tokens - 1, plan.update.unroll) > size.tokens - cursor:
                continue
            if not work.batches:  # The user has no token to predict.
                taken[place] = (0, 0, True)
                continue
            if work.batch is None:
                work.batch = _Batch.of(work.batches[work.step], self.row_V, self.is_said_V)
            if not size.is_shared:
                cursor = place * size.block
                _cover(ends, cursor, size)
            limit = size.tokens if size.is_shared else cursor + size.block
            windows, tokens = work.window, 0
            while windows < len(work.batch.lengths):
                end = cursor + tokens + work.batch.lengths[windows]
                if end > limit or len(ends) + 1 + _padding_windows(end, size) > size.windows:
                    break
                tokens += work.batch.lengths[windows]
                ends.append(cursor + tokens)
                windows += 1
            is_complete = windows == len(work.batch.lengths)
            if windows > work.window or is_complete:
                source, target = slice(work.token, work.token + tokens), slice(cursor, cursor + tokens)
                parts["row_N"][target] = work.batch.row_L[source]
                parts["position_N"][target] = work.batch.position_L[source]
                parts["target_N"][target] = work.batch.target_L[source]
                parts["weight_N"][target] = work.batch.weight_L[source]
                whole = -(-(cursor + tokens) // size.block) * size.block
                parts["span_2C"][[place, size.users + place]] = cursor, cursor + tokens
                parts["is_complete_C"][place] = is_complete
                taken[place] = (windows, work.token + tokens, is_complete)
                cursor = whole
        _cover(ends, size.tokens, size)
        parts["ends_M"][: len(ends)] = ends
        parts["ends_M"][len(ends) :] = size.tokens
        return taken

    def _advance(self, places: list[_Work | None], taken: dict[int, tuple[int, int, bool]]) -> None:
        """Update the progress of each user after a stream was computed.

        Args:
            places: The user at each place of the stream; None for an empty place.
            taken: The windows and tokens in this stream by place, as `_fill` returns them.
        """
        for place, (windows, tokens, is_complete) in taken.items():
            work = places[place]
            assert work is not None
            work.window, work.token = windows, tokens
            if is_complete:
                work.step, work.window, work.token, work.batch = work.step + 1, 0, 0, None
                work.is_finished = work.step >= len(work.batches)

    # --------------------------------------------------------------------------------- shapes and compilation

    def _step_for(self, plan: RoundPlan) -> _Step:
        """Return the step for the shapes of this plan; builds and compiles it at the first call."""
        self.model.check_length(plan.update.unroll)
        balls = tuple((b.where.start, b.where.stop) for b in plan.contribution.balls) or ((0, self.model.layout.total),)
        key = (plan.update.unroll, _windows_per_batch(plan), balls)
        if key not in self._steps:
            if len(self._steps) >= STEPS_KEPT:
                self._steps.clear()
            self._steps[key] = self._built(plan, balls)
        return self._steps[key]

    def _built(self, plan: RoundPlan, balls: tuple[tuple[int, int], ...]) -> _Step:
        """Build a step for streams of the largest size that fits into memory."""
        begun = time.perf_counter()
        if self._limit is None:
            self._limit = self._measured_limit(plan)
        step = None
        while step is None:
            size = self._size(plan, self._limit)
            with suppress(torch.OutOfMemoryError):
                step = self._compiled(size, balls)
            if step is None and self._steps:
                self._steps.clear()
                self._release()
            elif step is None:
                self._halve(size, plan)
        if self.is_compiled:
            self.say(f"compiled for {step.packed.size.tokens:,} tokens at once in {time.perf_counter() - begun:.0f} s")
        return step

    def _compiled(self, size: StreamSize, balls: tuple[tuple[int, int], ...]) -> _Step:
        """Build a step of one size, compile it, and record it as a CUDA graph. Warn if the model cannot be compiled."""
        packed = PackedModel(self.model.store_module, self.model.layout, size, self.device, self.dtype)
        step = _Step(packed, balls, is_compiled=self.is_compiled)
        if self.is_recomputed:
            _recompute(packed.layers)
        if not self.is_compiled:
            return step
        self.say(f"compiling the model for {size.tokens:,} tokens at once")
        for layer in (*packed.layers, *packed.last_norms):
            layer.compile(dynamic=False)
        packed.score_gradient = fast_score_gradient()
        for action, attempt in (("compiled", step.compute), ("recorded as a CUDA graph", step.record)):
            try:
                attempt()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Without compilation the step is slower, and the result is the same.
                warnings.warn(f"This model cannot be {action}, and trains more slowly: {error}", stacklevel=2)
                if attempt == step.compute:
                    self.is_compiled = False
                    return self._compiled(size, balls)
        return step

    def _size(self, plan: RoundPlan, limit: int) -> StreamSize:
        """Return the shapes for streams of about `limit` tokens, and at least one window."""
        T, B = plan.update.unroll, _windows_per_batch(plan)
        is_shared = self.model.train == "lora"
        if is_shared:
            block, tokens = 1, max(limit, T)
            per_step = max(1, tokens // (T * (B or 8)))
            # In example-level sampling a user is one example, and most examples fill a whole window.
            places = min(PLACES, 2) if isinstance(plan.sampling, ExampleSampling) else PLACES
            users = self.users_at_once or max(places * per_step, 64)
        else:
            block = -(-min(T * (B or 8), max(limit, T)) // 16) * 16
            users = min(max(1, limit // block), self.users_at_once or limit)
            tokens = users * block
        longest = max(T, 1)
        # The largest number of windows: full windows, a shorter last window of each user, and windows of padding.
        windows = 2 * -(-tokens // T) + users + 2 if is_shared else users * (-(-block // T) + 2) + 4
        return StreamSize(
            tokens=tokens, block=block, users=users, windows=windows, longest=longest, is_shared=is_shared
        )

    def _measured_limit(self, plan: RoundPlan) -> int:
        """Return how many tokens fit into memory, from the memory that one short stream takes without compilation.

        Sets `is_recomputed` if few tokens fit.
        """
        T = plan.update.unroll
        if self.device.type != "cuda":
            return max(512, T)
        size = self._size(plan, max(SMALLEST_STREAM, T))
        each = None
        with suppress(torch.OutOfMemoryError):
            each = self._bytes_per_token(size)
        self._release()
        if each is None:
            self.is_recomputed = True
            return max(512, T)
        fixed = 0.0 if size.is_shared else 4 * self.model.layout.total * 4 / size.block
        free, _ = torch.cuda.mem_get_info(self.device)
        limit = int(min(TOKENS_AT_ONCE, SHARE_OF_MEMORY * free / (each + fixed)))
        if limit < SMALLEST_STREAM:
            self.is_recomputed = True
        step = 8192 if limit >= 16384 else 512
        return max(limit // step * step, T)

    def _bytes_per_token(self, size: StreamSize) -> float:
        """Measure how many bytes of GPU memory the activations of a stream take per token."""
        torch.cuda.reset_peak_memory_stats(self.device)
        packed = PackedModel(self.model.store_module, self.model.layout, size, self.device, self.dtype)
        step = _Step(packed, ((0, self.model.layout.total),), is_compiled=False)
        before = torch.cuda.memory_allocated(self.device)
        step.run(step.next_host())
        return (torch.cuda.max_memory_allocated(self.device) - before) / size.tokens

    def _halve(self, size: StreamSize, plan: RoundPlan) -> None:
        """Halve the number of tokens of a stream after memory ran out, and warn.

        If a stream cannot be shorter, activations are from now on computed again in the backward pass.

        Raises:
            ModelError: One window does not fit into memory in this way either.
        """
        self._steps.clear()
        self._release()
        before = f"Memory ran out with {size.tokens:,} tokens at once"
        if (tokens := self._size(plan, size.tokens // 2).tokens) < size.tokens:
            self._limit = size.tokens // 2
            warnings.warn(f"{before}. The computation continues with {tokens:,}.", stacklevel=2)
        elif not self.is_recomputed:
            self.is_recomputed = True
            warnings.warn(f"{before}. Activations are computed again in the backward pass.", stacklevel=2)
        else:
            raise ModelError(
                f"A window of {plan.update.unroll} tokens of one user does not fit into the memory of {self.device}. "
                "Lower update.unroll, or train through LoRA of a lower rank."
            )

    def _release(self) -> None:
        """Return the memory of deleted steps to the GPU."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _users_by_length(lengths: Sequence[int] | np.ndarray, *, is_shared: bool) -> list[int]:
    """Return the indices of the users, the first user to process last, because the caller uses `pop()`.

    Users with the most text come first, so that all places become idle at about the same time at the end of a cohort.
    Where users share a stream (LoRA), users with the most and with the least text alternate. Otherwise all places would
    have short texts at the end, and the streams would not be full.

    Args:
        lengths: The number of tokens of each user.
        is_shared: Whether users share a stream.
    """
    shortest = sorted(range(len(lengths)), key=lambda k: lengths[k])
    if not is_shared:
        return shortest
    longest = shortest[::-1]
    return [shortest[turn // 2] if turn % 2 else longest[turn // 2] for turn in range(len(lengths))][::-1]


def _recompute(layers: nn.ModuleList) -> None:
    """Change the layers so that only the input of each is kept, and the rest is computed again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for layer in layers:
        plain = layer.forward
        vars(layer)["forward"] = lambda *args, _plain=plain, **kwargs: checkpoint(
            _plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


def _cover(ends: list[int], up_to: int, size: StreamSize) -> None:
    """Add windows of padding up to the token `up_to`, because attention needs every token of the stream in a window.

    Args:
        ends: The ends of the windows so far; changed in place.
        up_to: The end of the last window of padding.
        size: The shapes of the stream.
    """
    while ends[-1] < up_to:
        ends.append(min(ends[-1] + size.longest, up_to))


def _padding_windows(start: int, size: StreamSize) -> int:
    """Return an upper bound on the number of windows of padding after the token `start` of a stream."""
    rest = size.tokens - start
    return -(-rest // size.longest) + (0 if size.is_shared else -(-rest // size.block)) + 1


def _windows_per_batch(plan: RoundPlan) -> int | None:
    """Return the number of windows of a full batch; None if a batch holds all windows of a user."""
    return 1 if isinstance(plan.sampling, ExampleSampling) else plan.update.batch_size


__all__ = ["CannotPack", "PackedCohorts"]
