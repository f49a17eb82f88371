"""The recurrent cell in Triton, forward and backward, with the gates of a time step fused.

Kernels read and write the tensors of kernels.py. Their arguments are pointers; the letters are those of
stacked/__init__.py. `gates` [U, N, 4, H] is overwritten twice in a local step: it holds x W + b after read_inputs, the
values of the gates after cell_forward, and the gradients with respect to the gates' sums after cell_backward. The GRU
has three gates. It uses the fourth entry for h U, the state's part of the new gate n, whose gradient differs from that
of the input's part. plain.py computes the same in torch.

    LSTM (gates i, f, g, o; section 3 of the paper):    c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g)
                                                        h_t = sigmoid(o) tanh(c_t)
    GRU (gates r, z, n; Cho et al. 2014):               n = tanh(x W + b + r * (h U))
                                                        h_t = (1 - z) n + z h_(t-1)
"""

import triton
import triton.language as tl

from unheard.engines.stacked.kernel_parts import at_work, dot, matrix_block, sphere, state_weights, tanh, word_rows


@triton.jit
def read_inputs(
    delta, theta0, scale, run, step, num_steps, tokens, features, inputs, inverse, gates, U,
    P: tl.constexpr, AT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, F: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, XB: tl.constexpr, NB: tl.constexpr, BJ: tl.constexpr,
    UNIT: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the inputs x [N, X] of one user (word vectors and features), and x W + b for BJ columns of one gate.

    Writes x W + b [N, BJ] to `gates`, and for the backward pass x to `inputs` and 1 / norm of the word vectors to
    `inverse`. Grid: (G * blocks of columns, U)."""
    u = tl.program_id(1).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    blocks: tl.constexpr = (H + BJ - 1) // BJ
    gate = tl.program_id(0) // blocks
    j = (tl.program_id(0) % blocks) * BJ + tl.arange(0, BJ)
    X: tl.constexpr = D + F
    r = tl.load(run + u).to(tl.int64)
    c = tl.load(scale + u * M)
    n, d = tl.arange(0, NB), tl.arange(0, XB)
    token = tl.load(tokens + (tl.load(step).to(tl.int64) * U + u) * N + n, mask=n < N, other=0)
    x = word_rows(delta + u * P, theta0 + r * P, c, token, d, n < N, D, FRESH)
    scaled = tl.full([NB], 1.0, tl.float32)
    if UNIT:
        scaled = sphere(x)
        x = x * scaled[:, None]
    if F > 0:
        x += tl.load(features + u * F + d - D, mask=(d >= D) & (d < X), other=0.0)[None, :]
    x = x.to(inputs.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(inputs + (u * N + n)[:, None] * X + d[None, :], x, mask=(n < N)[:, None] & (d < X)[None, :])
        tl.store(inverse + u * N + n, scaled, mask=n < N)
    of_user, of_start, at = delta + u * P + AT, theta0 + r * P + AT, gate * R * H + d[:, None] * H + j[None, :]
    layer = u * M + 1 + 2 * gate
    w = matrix_block(of_user, of_start, scale, layer, at, (d < X)[:, None] & (j < H)[None, :], FRESH)
    bias = matrix_block(of_user, of_start, scale, layer + 1, gate * R * H + (R - 1) * H + j, j < H, FRESH)
    sums = dot(x, w, PRECISION, UPCAST) + bias.to(tl.float32)[None, :]
    at = ((u * N + n) * 4 + gate)[:, None] * H + j[None, :]
    tl.store(gates + at, sums, mask=(n < N)[:, None] & (j < H)[None, :])


@triton.jit
def cell_forward(
    run, step, num_steps, middle, gates, cells, states, t, U,
    X: tl.constexpr, H: tl.constexpr, B: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    MIDDLE: tl.constexpr, BB: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr,
    GRU: tl.constexpr, FIRST: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute time step t of the cell for BJ columns: the state h_t, the cell c_t [B, BJ], and the values of the gates.

    Alternates the order of users between time steps, so that the weights last used are still in L2. Grid: (blocks of
    columns, U)."""
    u = tl.program_id(1)
    u = tl.where(t % 2 == 0, u, U - 1 - u).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    b, k = tl.arange(0, BB), tl.arange(0, BK)
    here = (b < B)[:, None] & (j < H)[None, :]
    row = u * N + t * B + b
    at = (row * 4)[:, None] * H + j[None, :]
    g0 = tl.load(gates + at, mask=here, other=0.0).to(tl.float32)
    g1 = tl.load(gates + at + H, mask=here, other=0.0).to(tl.float32)
    g2 = tl.load(gates + at + 2 * H, mask=here, other=0.0).to(tl.float32)
    g3 = tl.zeros([BB, BJ], tl.float32)
    if not GRU:
        g3 = tl.load(gates + at + 3 * H, mask=here, other=0.0).to(tl.float32)
    of_before = (row - B)[:, None] * H + j[None, :]
    before = tl.zeros([BB, BJ], tl.float32)
    if not FIRST:
        of_user = state_weights(middle, run, u, MIDDLE, FRESH)
        for k0 in range(0, H, BK):
            of_row = (k0 + k) < H
            h = tl.load(
                states + (row - B)[:, None] * H + (k0 + k)[None, :], mask=(b < B)[:, None] & of_row[None, :], other=0.0
            )
            weights = of_user + X * H + (k0 + k)[:, None] * H + j[None, :]
            wanted = of_row[:, None] & (j < H)[None, :]
            g0 += dot(h, tl.load(weights, mask=wanted, other=0.0), PRECISION, UPCAST)
            g1 += dot(h, tl.load(weights + R * H, mask=wanted, other=0.0), PRECISION, UPCAST)
            third = dot(h, tl.load(weights + 2 * R * H, mask=wanted, other=0.0), PRECISION, UPCAST)
            if GRU:
                g3 += third
            else:
                g2 += third
                g3 += dot(h, tl.load(weights + 3 * R * H, mask=wanted, other=0.0), PRECISION, UPCAST)
        before = tl.load(cells + of_before, mask=here, other=0.0)
    g0, g1 = tl.sigmoid(g0), tl.sigmoid(g1)
    if GRU:
        g2 = tanh(g2 + g0 * g3)
        cell = (1.0 - g1) * g2 + g1 * before
        state = cell
    else:
        g2, g3 = tanh(g2), tl.sigmoid(g3)
        cell = g1 * before + g0 * g2
        state = g3 * tanh(cell)
    tl.store(gates + at, g0, mask=here)
    tl.store(gates + at + H, g1, mask=here)
    tl.store(gates + at + 2 * H, g2, mask=here)
    tl.store(gates + at + 3 * H, g3, mask=here)
    tl.store(cells + row[:, None] * H + j[None, :], cell, mask=here)
    tl.store(states + row[:, None] * H + j[None, :], state, mask=here)


@triton.jit
def cell_backward(
    run, step, num_steps, middle, gates, cells, state_grad, carried, t, U,
    X: tl.constexpr, H: tl.constexpr, B: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    MIDDLE: tl.constexpr, BB: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr,
    GRU: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute time step t of the backward pass for BJ columns.

    Replaces the gates' values in `gates` by the gradients with respect to the gates' sums. dl/dh_t [B, BJ] is the
    gradient from the output plus that of step t + 1 through the gates' weights on the state. `carried` [U, B, H] is the
    gradient that step t + 1 passes to step t without these weights: f * dl/dc (LSTM), or z * dl/dh (GRU). Grid: (blocks
    of columns, U)."""
    u = tl.program_id(1)
    u = tl.where(t % 2 == 0, u, U - 1 - u).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    b, k = tl.arange(0, BB), tl.arange(0, BK)
    here = (b < B)[:, None] & (j < H)[None, :]
    row = u * N + t * B + b
    at_state = row[:, None] * H + j[None, :]
    at_carried = (u * B + b)[:, None] * H + j[None, :]
    dh = tl.load(state_grad + at_state, mask=here, other=0.0).to(tl.float32)
    from_later = tl.zeros([BB, BJ], tl.float32)
    if not LAST:
        blocks: tl.constexpr = (H + BK - 1) // BK
        of_user = state_weights(middle, run, u, MIDDLE, FRESH)
        for block in range(G * blocks):
            gate = block // blocks
            place = gate
            if GRU:  # The gradient of h U, the state's part of n, is in the fourth entry.
                place = tl.where(gate == 2, 3, gate)
            column = (block % blocks) * BK + k
            later = tl.load(
                gates + ((row + B) * 4 + place)[:, None] * H + column[None, :],
                mask=(b < B)[:, None] & (column < H)[None, :], other=0.0,
            )  # fmt: skip
            w = tl.load(
                of_user + gate * R * H + (X + j)[:, None] * H + column[None, :],
                mask=(j < H)[:, None] & (column < H)[None, :], other=0.0,
            )  # fmt: skip
            dh += dot(later.to(middle.dtype.element_ty), tl.trans(w), PRECISION, UPCAST)
        from_later = tl.load(carried + at_carried, mask=here, other=0.0)
    at = (row * 4)[:, None] * H + j[None, :]
    g0 = tl.load(gates + at, mask=here, other=0.0).to(tl.float32)
    g1 = tl.load(gates + at + H, mask=here, other=0.0).to(tl.float32)
    g2 = tl.load(gates + at + 2 * H, mask=here, other=0.0).to(tl.float32)
    g3 = tl.load(gates + at + 3 * H, mask=here, other=0.0).to(tl.float32)
    before = tl.zeros([BB, BJ], tl.float32)
    if not FIRST:
        before = tl.load(cells + (row - B)[:, None] * H + j[None, :], mask=here, other=0.0)
    if GRU:
        dh += from_later
        d2 = dh * (1.0 - g1) * (1.0 - g2 * g2)
        d0 = d2 * g3 * g0 * (1.0 - g0)
        d1 = dh * (before - g2) * g1 * (1.0 - g1)
        d3 = d2 * g0
        pass_on = dh * g1
    else:
        cell = tanh(tl.load(cells + at_state, mask=here, other=0.0))
        dcell = from_later + dh * g3 * (1.0 - cell * cell)
        d0 = dcell * g2 * g0 * (1.0 - g0)
        d1 = dcell * before * g1 * (1.0 - g1)
        d2 = dcell * g0 * (1.0 - g2 * g2)
        d3 = dh * cell * g3 * (1.0 - g3)
        pass_on = dcell * g1
    tl.store(gates + at, d0, mask=here)
    tl.store(gates + at + H, d1, mask=here)
    tl.store(gates + at + 2 * H, d2, mask=here)
    tl.store(gates + at + 3 * H, d3, mask=here)
    tl.store(carried + at_carried, pass_on, mask=here)


@triton.jit
def input_gradients(
    delta, theta0, scale, run, step, num_steps, gates, inputs, inverse, input_grad,
    P: tl.constexpr, AT: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, X: tl.constexpr, H: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    DB: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    UNIT: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute dl/dx [BN, D], the gradients with respect to the word vectors at BN positions.

    This is the product of the gates' gradients and the input weights. With unit norms, the derivative of the
    normalisation is applied too: d <- (d - (d . x) x) / norm. Grid: (blocks of positions, U)."""
    u = tl.program_id(1).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    n, d, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, DB), tl.arange(0, BK)
    place = (n < N)[:, None] & (d < D)[None, :]
    dx = tl.zeros([BN, DB], tl.float32)
    of_user, of_start = delta + u * P + AT, theta0 + tl.load(run + u).to(tl.int64) * P + AT
    for gate in range(G):
        for k0 in range(0, H, BK):
            dg = tl.load(
                gates + ((u * N + n) * 4 + gate)[:, None] * H + (k0 + k)[None, :],
                mask=(n < N)[:, None] & (k0 + k < H)[None, :], other=0.0,
            )  # fmt: skip
            at = gate * R * H + d[:, None] * H + (k0 + k)[None, :]
            here = (d < D)[:, None] & (k0 + k < H)[None, :]
            w = matrix_block(of_user, of_start, scale, u * M + 1 + 2 * gate, at, here, FRESH)
            dx += dot(dg.to(inputs.dtype.element_ty), tl.trans(w), PRECISION, UPCAST)
    if UNIT:
        x = tl.load(inputs + (u * N + n)[:, None] * X + d[None, :], mask=place, other=0.0).to(tl.float32)
        scaled = tl.load(inverse + u * N + n, mask=n < N, other=0.0)
        dx = (dx - tl.sum(dx * x, 1)[:, None] * x) * scaled[:, None]
    tl.store(input_grad + (u * N + n)[:, None] * D + d[None, :], dx, mask=place)
