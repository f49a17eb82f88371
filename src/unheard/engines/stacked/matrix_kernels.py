"""The matrices of the gates and of the projection in Triton: their values, the projection, their update, and the clip.

Kernels read and write the tensors of kernels.py. Their arguments are pointers; the letters are those of
stacked/__init__.py. plain.py computes the same in torch."""

import triton
import triton.language as tl

from unheard.engines.stacked.kernel_parts import at_work, changed, dot, matrix_block, sphere, word_rows


@triton.jit
def form_state_weights(
    delta, theta0, scale, run, step, num_steps, middle,
    P: tl.constexpr, AT: tl.constexpr, M: tl.constexpr, X: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    MIDDLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute theta0 + c * delta for one gate's weights on the state, [H, H], in the precision of the products.

    The cell reads the values in every time step, forward and backward, so they are computed once and stored. Grid:
    (blocks of H * H, U, G)."""
    u, gate = tl.program_id(1).to(tl.int64), tl.program_id(2)
    if not at_work(step, num_steps, u):
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = gate * R * H + X * H + i
    of_start = theta0 + tl.load(run + u).to(tl.int64) * P + AT
    w = matrix_block(delta + u * P + AT, of_start, scale, u * M + 1 + 2 * gate, at, i < H * H, False)
    tl.store(middle + u * MIDDLE + at, w, mask=i < H * H)


@triton.jit
def project(
    delta, theta0, scale, run, step, num_steps, states, output,
    P: tl.constexpr, AT: tl.constexpr, LAYER: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, N: tl.constexpr, DB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FRESH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the outputs o = h projection + bias, [BN, D], at BN positions. Grid: (blocks of positions, U)."""
    u = tl.program_id(1).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    n, d, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, DB), tl.arange(0, BK)
    of_user, of_start = delta + u * P + AT, theta0 + tl.load(run + u).to(tl.int64) * P + AT
    o = tl.zeros([BN, DB], tl.float32)
    for k0 in range(0, H, BK):
        inside = (k0 + k) < H
        h = tl.load(
            states + (u * N + n)[:, None] * H + (k0 + k)[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0
        )
        at, here = (k0 + k)[:, None] * D + d[None, :], inside[:, None] & (d < D)[None, :]
        w = matrix_block(of_user, of_start, scale, u * M + LAYER, at, here, FRESH)
        o += dot(h, w, PRECISION, UPCAST)
    bias = matrix_block(of_user, of_start, scale, u * M + LAYER + 1, H * D + d, d < D, FRESH)
    o += bias.to(tl.float32)[None, :]
    tl.store(output + (u * N + n)[:, None] * D + d[None, :], o, mask=(n < N)[:, None] & (d < D)[None, :])


@triton.jit
def project_back(
    delta, theta0, scale, run, step, num_steps, targets, share, part_sum, part_peak, part_total,
    log_sum, output_grad, state_grad, U,
    P: tl.constexpr, TABLE: tl.constexpr, TABLE_LAYER: tl.constexpr, AT: tl.constexpr, LAYER: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    DB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    UNIT: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Combine the splits of `attend` for BN positions, and compute the gradients with respect to outputs and states.

    Writes log_sum [BN], the log of the sum of exponentials; dl/do [BN, D] = share * (expected word vector - vector of
    the target); and dl/dh [BN, H] = dl/do projection^T. Grid: (blocks of positions, U)."""
    u = tl.program_id(1).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    now = tl.load(step)
    n, d, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, DB), tl.arange(0, BK)
    inside = n < N
    place = inside[:, None] & (d < D)[None, :]
    peak = tl.full([BN], -1e30, tl.float32)
    for s in range(SPLITS):
        peak = tl.maximum(peak, tl.load(part_peak + (u * SPLITS + s) * N + n, mask=inside, other=-1e30))
    total = tl.zeros([BN], tl.float32)
    expected = tl.zeros([BN, DB], tl.float32)
    for s in range(SPLITS):
        at = (u * SPLITS + s) * N + n
        share_of_split = tl.exp(tl.load(part_peak + at, mask=inside, other=-1e30) - peak)
        total += share_of_split * tl.load(part_total + at, mask=inside, other=1.0)
        expected += share_of_split[:, None] * tl.load(part_sum + at[:, None] * D + d[None, :], mask=place, other=0.0)
    tl.store(log_sum + u * N + n, peak + tl.log(total), mask=inside)
    target = tl.load(targets + (now.to(tl.int64) * U + u) * N + n, mask=inside, other=-1)
    r = tl.load(run + u).to(tl.int64)
    c = tl.load(scale + u * M + TABLE_LAYER)
    true = word_rows(delta + u * P + TABLE, theta0 + r * P + TABLE, c, target, d, target >= 0, D, FRESH)
    if UNIT:
        true = true * sphere(true)[:, None]
    weight = tl.where(target >= 0, tl.load(share + now * U + u), 0.0)
    do = ((expected / total[:, None] - true) * weight[:, None]).to(output_grad.dtype.element_ty)
    tl.store(output_grad + (u * N + n)[:, None] * D + d[None, :], do, mask=place)
    of_user, of_start = delta + u * P + AT, theta0 + r * P + AT
    for k0 in range(0, H, BK):
        at, here = (k0 + k)[:, None] * D + d[None, :], (k0 + k < H)[:, None] & (d < D)[None, :]
        w = matrix_block(of_user, of_start, scale, u * M + LAYER, at, here, FRESH)
        dh = dot(do, tl.trans(w), PRECISION, UPCAST)
        tl.store(
            state_grad + (u * N + n)[:, None] * H + (k0 + k)[None, :], dh, mask=inside[:, None] & (k0 + k < H)[None, :]
        )


@triton.jit
def update_matrix(
    delta, scale, run, step, num_steps, rate, keep, inputs, states, grads, squares,
    P: tl.constexpr, AT: tl.constexpr, LAYER: tl.constexpr, M: tl.constexpr, SLOTS: tl.constexpr, SLOT: tl.constexpr,
    N: tl.constexpr, X: tl.constexpr, K: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, SHIFT: tl.constexpr,
    NB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, GRU: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Update a block of a matrix [X + K + 1, C] of one user: delta <- c * keep * delta - eta * z^T gradients.

    z [N, X + K + 1] is the input of the matrix: X inputs, K states of the position that is SHIFT positions earlier, and
    a constant 1 for the bias. For the gates X is the input size of the cell, K = C = H and SHIFT = B. For the
    projection X = 0, K = H, C = D and SHIFT = 0. Also writes the squared norms of the new delta, those of weight and
    bias in separate slots. Grid: (gates * blocks of rows * blocks of columns, U)."""
    u = tl.program_id(1).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    R: tl.constexpr = X + K + 1
    row_blocks: tl.constexpr = (R + BR - 1) // BR
    col_blocks: tl.constexpr = (C + BC - 1) // BC
    pid = tl.program_id(0)
    gate = pid // (row_blocks * col_blocks)
    i = (pid // col_blocks) % row_blocks * BR + tl.arange(0, BR)
    j = (pid % col_blocks) * BC + tl.arange(0, BC)
    n = tl.arange(0, NB)
    inside = (n < N)[None, :]
    of_state = (i >= X) & (i < X + K)
    z = tl.load(
        states + (u * N + n - SHIFT)[None, :] * K + (i - X)[:, None],
        mask=of_state[:, None] & inside & (n >= SHIFT)[None, :], other=0.0,
    )  # fmt: skip
    if X > 0:
        x = tl.load(inputs + (u * N + n)[None, :] * X + i[:, None], mask=(i < X)[:, None] & inside, other=0.0)
        z = tl.where(of_state[:, None], z, x)
    z = tl.where((i == R - 1)[:, None] & inside, 1.0, z.to(tl.float32))
    of_grads = (u * N + n)[:, None] * STRIDE + j[None, :]
    wanted = (n < N)[:, None] & (j < C)[None, :]
    g = tl.load(grads + of_grads + gate * C, mask=wanted, other=0.0).to(states.dtype.element_ty)
    if GRU and gate == 2:
        other = tl.load(grads + of_grads + 3 * C, mask=wanted, other=0.0).to(states.dtype.element_ty)
        without_state = tl.where(of_state[:, None], 0.0, z).to(states.dtype.element_ty)
        only_state = tl.where(of_state[:, None], z, 0.0).to(states.dtype.element_ty)
        step_RC = dot(without_state, g, PRECISION, UPCAST) + dot(only_state, other, PRECISION, UPCAST)
    else:
        step_RC = dot(z.to(states.dtype.element_ty), g, PRECISION, UPCAST)
    r = tl.load(run + u).to(tl.int64)
    eta = tl.load(rate + r)
    left = tl.load(keep + r)
    c_weight = tl.load(scale + u * M + LAYER + 2 * gate)
    c_bias = tl.load(scale + u * M + LAYER + 2 * gate + 1)
    c = tl.where(i == R - 1, c_bias, c_weight) * left
    here = (i < R)[:, None] & (j < C)[None, :]
    at = u * P + AT + gate * R * C + i[:, None] * C + j[None, :]
    new = c[:, None] * changed(delta + at, here, FRESH) - eta * step_RC
    stored = new.to(delta.dtype.element_ty)
    tl.store(delta + at, stored, mask=here)
    kept = tl.where(here, stored.to(tl.float32), 0.0)
    kept = tl.sum(kept * kept, 1)
    tl.store(squares + u * SLOTS + SLOT + 2 * pid, tl.sum(tl.where(i < R - 1, kept, 0.0)))
    tl.store(squares + u * SLOTS + SLOT + 2 * pid + 1, tl.sum(tl.where(i == R - 1, kept, 0.0)))


@triton.jit
def clip_scale(
    squares, slot_layer, radius, clip_kind, run, step, num_steps, scale, unclipped, square,
    SLOTS: tl.constexpr, SB: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute the factors of the clip, scale [M] = min(1, S_m / norm of layer m), from the slots of `squares`.

    A flat clip has the same factor for every layer. The factors are applied when the delta is next read. A norm of NaN
    gives the factor 1; the aggregation replaces the contribution of such a user by zero. Also sets `unclipped` to 0 for
    a user who was clipped, and writes the squared norms `square` [M] for the aggregation: those of the layers if the
    clip is per layer, else that of the whole delta. Grid: (U,)."""
    u = tl.program_id(0)
    if not at_work(step, num_steps, u):
        return
    s = tl.arange(0, SB)
    part = tl.load(squares + u.to(tl.int64) * SLOTS + s, mask=s < SLOTS, other=0.0)
    layer = tl.load(slot_layer + s, mask=s < SLOTS, other=-1)
    r = tl.load(run + u)
    kind = tl.load(clip_kind + r)
    total = tl.sum(part)
    whole = tl.load(unclipped + u)
    for m in range(M):
        of_layer = tl.where(kind == 2, tl.sum(tl.where(layer == m, part, 0.0)), total)
        tl.store(square + u * M + m, of_layer)
        bound = tl.load(radius + r * M + m)
        over = (kind > 0) & (of_layer > bound * bound)
        tl.store(scale + u * M + m, tl.where(over, bound / tl.sqrt(of_layer), 1.0))
        whole = tl.where(over, 0, whole)
    tl.store(unclipped + u, whole)
