"""Sums the updates of a cohort for a Hugging Face model, with the windows of many users in one stream.

The engine `vectorised` uses it on a GPU. Users take turns: a user occupies one of C places until the last local step,
and then the next user takes the place, so that streams stay full whatever users' lengths are. A batch that does not
fit into the rest of a stream continues in the next; the gradient of its parts is added before the local step is taken.

Every step has the same shapes (`StreamSize`), so it is compiled once, and on CUDA recorded as one graph. The number of
tokens of a stream comes from a measurement of memory. If memory runs out nevertheless, it is halved, and the users who
had not finished begin again from the parameters of the round: nothing is lost, and nobody is counted twice.

    packed = PackedCohorts(model, device, torch.bfloat16)
    total = packed.sum_updates(params_P, users, plan, seed)
"""

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from unheard.updates.user_update import User

TOKENS_AT_ONCE = 2**15
"""The largest number of tokens of a stream: more is not faster."""
SHARE_OF_MEMORY = 0.7
"""How much of the free memory the activations of a stream may take, by the measurement of a short stream."""
LARGE_DELTAS = 2**29
"""Above this number of coordinates of all users together, local steps are taken one user at a time."""
LARGEST_DIFFERENCE = 0.1
"""The largest relative difference of scores between the packed computation in bfloat16 and the model in float32."""
SMALLEST_STREAM = 2048
"""Below this number of tokens, activations are computed again in the backward pass instead of being kept."""
BLOCKS = (64, 32, 16)
"""Sizes of a block of LoRA, in tokens. The first that leaves little of a full batch's last block empty is used."""
PLACES = 4
"""Places for each full batch that fits into a stream of LoRA: many users write less than a full batch."""
STEPS_KEPT = 2
"""Compiled steps that are kept: runs side by side may have two shapes."""


@dataclass
class _Batch:
    """The windows of one local batch, one after the other."""

    row_L: np.ndarray
    target_L: np.ndarray
    weight_L: np.ndarray
    position_L: np.ndarray
    lengths: list[int]

    @classmethod
    def of(cls, window_BW: np.ndarray, row_V: np.ndarray, is_said_V: np.ndarray) -> "_Batch":
        """Flatten the windows of a local batch, without the empty end of each."""
        input_BT, target_BT = window_BW[:, :-1], window_BW[:, 1:]
        is_here_BT = (input_BT != PAD) & (target_BT != PAD)
        lengths_B = np.where(is_here_BT.any(1), is_here_BT.shape[1] - is_here_BT[:, ::-1].argmax(1), 0)
        kept_BT = np.arange(is_here_BT.shape[1]) < lengths_B[:, None]
        counts_L = (is_here_BT & (target_BT != BOS))[kept_BT]
        target_L = np.maximum(target_BT[kept_BT], 0)
        # Words without a row of their own count in the mean, and have no gradient.
        weight_L = (counts_L & is_said_V[target_L]).astype(np.float32) / np.float32(max(int(counts_L.sum()), 1))
        positions_BT = np.broadcast_to(np.arange(is_here_BT.shape[1]), is_here_BT.shape)
        row_L = row_V[np.maximum(input_BT[kept_BT], 0)]
        return cls(row_L, row_V[target_L], weight_L, positions_BT[kept_BT], [int(n) for n in lengths_B if n])


@dataclass
class _Work:
    """The user at one place of the stream, and how far the user's batches are done."""

    user: int
    batches: list[np.ndarray]
    step: int = 0
    window: int = 0
    token: int = 0
    batch: _Batch | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all batches were used."""
        return self.step >= len(self.batches)


@dataclass
class _HostStream:
    """One stream in host memory, as one array of 32-bit numbers, so that one copy takes it to the device."""

    size: StreamSize
    numbers: Tensor
    parts: dict[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def layout(size: StreamSize, balls: int) -> dict[str, tuple[int, type]]:
        """The length and the type of each part of the array, in order."""
        return {
            "row_N": (size.tokens, np.int32),
            "position_N": (size.tokens, np.int32),
            "target_N": (size.tokens, np.int32),
            "weight_N": (size.tokens, np.float32),
            "user_K": (size.blocks, np.int32),
            "ends_M": (size.windows + 1, np.int32),
            "is_complete_C": (size.users, np.int32),
            "settings": (2 + balls, np.float32),
        }

    @classmethod
    def empty(cls, size: StreamSize, balls: int, device: torch.device) -> "_HostStream":
        """Allocate a stream of zeros."""
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
    """One step on buffers of fixed shapes: the gradients of a stream, and a local step of each user whose batch is complete."""

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
        """Host memory that no copy is reading any more."""
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
        """Record the step as a CUDA graph; the deltas stay zero, because a new stream is padding."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.compute()
        self.graph = graph

    def compute(self) -> None:
        """Compute the gradients of the stream, and take the local steps that are due."""
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
            parts["user_K"].long(),
            parts["ends_M"],
        )
        with torch.no_grad():
            for name, leaf in self.packed.leaves.items():
                part = self.packed.layout.slices[name]
                torch.add(self.theta0_P[part], self.delta_CP[:, part], out=leaf.view(len(leaf), -1))
        gradients = self.packed.gradients(stream)
        with torch.no_grad():
            if self.packed.size.is_shared:
                self.gradient_CP += torch.cat([gradients[name].flatten(1) for name in self.packed.layout.names], dim=1)
            else:  # one by one, to need no more memory
                for name, part in self.packed.layout.slices.items():
                    self.gradient_CP[:, part] += gradients.pop(name).flatten(1)
            is_complete_C = parts["is_complete_C"].bool()
            # Large deltas go one by one: a kernel over all of them would be slow to compile, and needs more memory.
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
    """delta <- Clip(keep * delta - eta * gradient) for each user whose batch is complete; in place.

    Args:
        delta_CP: The users' deltas so far.
        gradient_CP: The gradients of the batches; zero afterwards for those that are complete.
        was_clipped_C: Set where a user was clipped.
        is_complete_C: Whose batch is complete.
        settings: eta, 1 - eta * lambda, and the radii of the balls.
        balls: The start and end of each ball of the clip.
    """
    is_complete_C1 = is_complete_C[:, None]
    for number, (start, stop) in enumerate(balls):
        moved_CL = settings[1] * delta_CP[:, start:stop] - settings[0] * gradient_CP[:, start:stop]
        norm_C1 = torch.linalg.vector_norm(moved_CL, dim=1, keepdim=True)
        radius = settings[2 + number]
        # `where`, not min(1, S/norm): with a NaN the latter can come out as 1, which is no clip at all.
        moved_CL = moved_CL * torch.where(norm_C1 > radius, radius / norm_C1, 1.0)
        was_clipped_C |= is_complete_C & (norm_C1[:, 0] > radius)
        delta_CP[:, start:stop] = torch.where(is_complete_C1, moved_CL, delta_CP[:, start:stop])
    gradient_CP.masked_fill_(is_complete_C1, 0.0)


class PackedCohorts:
    """Sums of cohorts of a Hugging Face model.

    Args:
        model: A `HuggingFaceModel`.
        device: "cuda"; "cpu" for tests.
        dtype: The type of products.
        users_at_once: The number of places; None: by the shapes of a stream.
        tokens_at_once: N; None: by a measurement of memory.
        is_compiled: Whether layers are compiled and steps recorded as a CUDA graph.
        say: Takes lines about the progress of compilation.

    Raises:
        CannotPack: At the first cohort, for a model without a rule.
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
        """Compare the scores of one short stream with those of the model.

        Raises:
            CannotPack: If the model has a part without a rule, or the scores differ.
        """
        size = StreamSize(tokens=32, block=16, users=2, windows=4, longest=16, is_shared=self.model.train == "lora")
        packed = PackedModel(self.model.store_module, self.model.layout, size, self.device, self.dtype)
        packed.load(params_P.expand(2, -1))
        token_N = torch.arange(32, device=self.device) * 7 % len(self.row_V)
        row_V = torch.as_tensor(self.row_V, device=self.device)
        position_N = torch.arange(32, device=self.device) % 8
        ends_M = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32, device=self.device)
        user_K = torch.tensor([0, 1], device=self.device)
        none_N = torch.zeros(32, device=self.device)
        scores_NR = packed.packed_logits(Stream(row_V[token_N], position_N, token_N, none_N, user_K, ends_M)).float()
        with torch.no_grad():
            logits_BTV = self.model.logits(self.model.layout.split(params_P), token_N.view(4, 8), None)
        said_V = torch.as_tensor(self.is_said_V, device=self.device)
        given = scores_NR[:, row_V][:, said_V]
        expected = logits_BTV.reshape(32, -1)[:, said_V].float()
        error = (given - expected).norm() / expected.norm()
        if not error < LARGEST_DIFFERENCE:
            raise CannotPack(f"packed, it has other scores (relative difference {float(error):.2g})")

    # ------------------------------------------------------------------------------------------ a cohort

    def sum_updates(self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, seed: int) -> CohortSum:
        """The sum over users of w_k * Clip(delta_k); the same as `Engine.sum_updates`."""
        return plan.contribution.sum(self._finished(params_P, users, plan, seed), self.model.layout.total)

    def _finished(self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, seed: int) -> Iterator[CohortSum]:
        """Train the users in the places of the stream, and yield the sum of those that finish together."""
        # A user's batches are cut when the user takes a place, while the GPU computes the streams before.
        step = self._started(plan, params_P)
        waiting = _turns([len(user.tokens) for user in users], is_shared=step.packed.size.is_shared)
        places: list[_Work | None] = [None] * step.packed.size.users
        while waiting or any(places):
            for place, work in enumerate(places):
                if work is None and waiting:
                    k = waiting.pop()
                    places[place] = _Work(k, list(plan.update.batches(users[k], seed)))
            total: CohortSum | None = None
            try:
                host = step.next_host()
                taken = self._fill(host, places, plan, is_end=not waiting)
                step.run(host)
                self._advance(places, taken)
                done = [place for place, work in enumerate(places) if work is not None and work.is_finished]
                if done:
                    total = self._contribution(step, done, [places[p].user for p in done], users, plan)  # pyright: ignore
            except torch.OutOfMemoryError:
                done = None
            if done is None:  # outside of `except`, where the error would keep the activations in memory
                size = step.packed.size
                del step
                self._halve(size, plan)
                step = self._started(plan, params_P)
                # The deltas and gradients of unfinished users may be incomplete, so these users begin again.
                waiting += [work.user for work in places if work is not None]
                places = [None] * step.packed.size.users
                continue
            if total is not None:
                yield total
            for place in done:
                places[place] = None

    def _started(self, plan: RoundPlan, params_P: Tensor) -> _Step:
        """The step for this plan, with the parameters of the round and no users yet."""
        step = self._step_for(plan)
        step.theta0_P.copy_(params_P)
        step.delta_CP.zero_()
        step.gradient_CP.zero_()
        step.was_clipped_C.zero_()
        return step

    def _contribution(
        self, step: _Step, done: list[int], who: list[int], users: Sequence[User], plan: RoundPlan
    ) -> CohortSum:
        """Sum the clipped updates of the users in the places `done`, and clear those places."""
        done_D = to_device(np.array(done, dtype=np.int64), self.device)
        delta_UP = step.delta_CP.index_select(0, done_D)
        unclipped_U = ~step.was_clipped_C.index_select(0, done_D) if plan.adaptive_clip else None
        weight_units_U = plan.weights.units(np.array([len(users[k].tokens) for k in who]))
        total = plan.contribution.of_users(delta_UP, weight_units_U, unclipped_U)
        # DP: the row of a finished user is set to zero before the next user gets it; nothing of one user is in the delta
        # of another.
        step.delta_CP.index_fill_(0, done_D, 0.0)
        step.gradient_CP.index_fill_(0, done_D, 0.0)
        step.was_clipped_C.index_fill_(0, done_D, False)
        return total

    # ------------------------------------------------------------------------------------------ a stream

    def _fill(
        self, host: _HostStream, places: list[_Work | None], plan: RoundPlan, *, is_end: bool = False
    ) -> dict[int, tuple[int, int, bool]]:
        """Write the next windows of the users into a stream.

        Args:
            host: Where to write them.
            places: The users, by place.
            plan: The local step.
            is_end: Whether all users of the cohort have had a place. From then on those with the most steps left come
                first, so that the last streams are full too.

        Returns:
            For each place with work in the stream: the windows and tokens of its batch that are now taken, and whether
            the batch is complete.
        """
        size, parts = host.size, host.parts
        for name in ("row_N", "position_N", "target_N", "weight_N", "user_K", "is_complete_C"):
            parts[name].fill(0)
        eta = plan.update.learning_rate
        radii = [ball.radius for ball in plan.contribution.balls] or [math.inf]
        parts["settings"][:] = [eta, 1 - eta * plan.update.update_penalty, *radii]
        taken: dict[int, tuple[int, int, bool]] = {}
        ends, cursor = [0], 0
        order = list(enumerate(places))
        if is_end and size.is_shared:
            order.sort(key=lambda pair: 0 if pair[1] is None else pair[1].step - len(pair[1].batches))
        for place, work in order:
            if work is None:
                continue
            if work.is_finished:  # a user without a target
                taken[place] = (0, 0, False)
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
                parts["user_K"][cursor // size.block : whole // size.block] = place
                parts["is_complete_C"][place] = is_complete
                taken[place] = (windows, work.token + tokens, is_complete)
                if tokens:
                    ends[-1] = whole if size.is_shared else ends[-1]
                cursor = whole
        _cover(ends, size.tokens, size)
        parts["ends_M"][: len(ends)] = ends
        parts["ends_M"][len(ends) :] = size.tokens
        return taken

    def _advance(self, places: list[_Work | None], taken: dict[int, tuple[int, int, bool]]) -> None:
        """Record how far the stream took each user."""
        for place, (windows, tokens, is_complete) in taken.items():
            work = places[place]
            assert work is not None
            work.window, work.token = windows, tokens
            if is_complete:
                work.step, work.window, work.token, work.batch = work.step + 1, 0, 0, None

    # --------------------------------------------------------------------------------- shapes and compilation

    def _step_for(self, plan: RoundPlan) -> _Step:
        """The step for the shapes of this plan, compiled at its first use."""
        self.model.check_length(plan.update.unroll)
        balls = tuple((b.where.start, b.where.stop) for b in plan.contribution.balls) or ((0, self.model.layout.total),)
        key = (plan.update.unroll, _windows_per_batch(plan), balls)
        if key not in self._steps:
            if len(self._steps) >= STEPS_KEPT:
                self._steps.clear()
            self._steps[key] = self._built(plan, balls)
        return self._steps[key]

    def _built(self, plan: RoundPlan, balls: tuple[tuple[int, int], ...]) -> _Step:
        """Build a step of the largest size that fits into memory."""
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
        """Compile a step and record it as a CUDA graph, where the model allows it."""
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
            except Exception as error:  # slower, with the same result
                warnings.warn(f"This model cannot be {action}, and trains more slowly: {error}", stacklevel=2)
                if attempt == step.compute:
                    self.is_compiled = False
                    return self._compiled(size, balls)
        return step

    def _size(self, plan: RoundPlan, limit: int) -> StreamSize:
        """The shapes for streams of at most `limit` tokens."""
        T, B = plan.update.unroll, _windows_per_batch(plan)
        is_shared = self.model.train == "lora"
        if is_shared:
            block = _block(T * (B or 1))
            tokens = max(limit // block, -(-T // block)) * block
            per_step = max(1, tokens // (-(-T * (B or 8) // block) * block))
            # Of examples, few are not full.
            places = min(PLACES, 2) if isinstance(plan.sampling, ExampleSampling) else PLACES
            users = self.users_at_once or max(places * per_step, 64)
        else:
            block = -(-min(T * (B or 8), max(limit, T)) // 16) * 16
            users = min(max(1, limit // block), self.users_at_once or limit)
            tokens = users * block
        longest = T + block if is_shared else max(T, 1)
        # Full windows, a shorter one of each user, and padding.
        windows = 2 * -(-tokens // T) + users + 2 if is_shared else users * (-(-block // T) + 2) + 4
        return StreamSize(
            tokens=tokens, block=block, users=users, windows=windows, longest=longest, is_shared=is_shared
        )

    def _measured_limit(self, plan: RoundPlan) -> int:
        """How many tokens fit, from the memory that one short stream takes without compilation."""
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
        """The memory that the activations of a stream take on the GPU, per token."""
        torch.cuda.reset_peak_memory_stats(self.device)
        packed = PackedModel(self.model.store_module, self.model.layout, size, self.device, self.dtype)
        step = _Step(packed, ((0, self.model.layout.total),), is_compiled=False)
        before = torch.cuda.memory_allocated(self.device)
        step.run(step.next_host())
        return (torch.cuda.max_memory_allocated(self.device) - before) / size.tokens

    def _halve(self, size: StreamSize, plan: RoundPlan) -> None:
        """Halve the number of tokens of a stream after memory ran out.

        The last resort, for streams of about one window, is to compute activations again in the backward pass.

        Raises:
            ModelError: If one window does not fit.
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
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _turns(lengths: Sequence[int], *, is_shared: bool) -> list[int]:
    """Return the users in the reverse of the order in which they enter the stream: `pop()` takes the next one.

    Users with much text come first: at the end of a cohort, places that nobody needs are idle for few steps. Where users
    share a stream, the ones with the least text come between them. Else places would hold short texts only in the end,
    and streams would not be full.
    """
    shortest = sorted(range(len(lengths)), key=lambda k: lengths[k])
    if not is_shared:
        return shortest
    longest = shortest[::-1]
    return [shortest[turn // 2] if turn % 2 else longest[turn // 2] for turn in range(len(lengths))][::-1]


def _recompute(layers: nn.ModuleList) -> None:
    """Keep the input of each layer only, and compute the rest again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for layer in layers:
        plain = layer.forward
        vars(layer)["forward"] = lambda *args, _plain=plain, **kwargs: checkpoint(
            _plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


def _cover(ends: list[int], up_to: int, size: StreamSize) -> None:
    """Add windows of padding until `up_to`, so that attention computes every token of the stream."""
    while ends[-1] < up_to:
        ends.append(min(ends[-1] + size.longest, up_to))


def _padding_windows(start: int, size: StreamSize) -> int:
    """The largest number of windows of padding after a token of the stream."""
    rest = size.tokens - start
    return -(-rest // size.longest) + (0 if size.is_shared else -(-rest // size.block)) + 1


def _block(tokens: int) -> int:
    """The size of a block for batches of this many tokens: the largest that leaves little of the last block empty."""
    return next((b for b in BLOCKS if -(-tokens // b) * b <= 1.02 * tokens), BLOCKS[-1])


def _windows_per_batch(plan: RoundPlan) -> int | None:
    """The number of windows of a full batch; None: as many as a user has."""
    return 1 if isinstance(plan.sampling, ExampleSampling) else plan.update.batch_size


__all__ = ["CannotPack", "PackedCohorts"]
