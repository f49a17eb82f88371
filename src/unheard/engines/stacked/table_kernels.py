"""The word tables in Triton: the softmax over all words, and the update of the table in place.

Kernels read and write the tensors of kernels.py. Their arguments are pointers; the letters are those of
stacked/__init__.py. Logits [N, V] and dense gradients [V, D] are never written to memory: each program reads tiles of
BV words, normalises them, and multiplies them with the outputs. The softmax keeps a running maximum over tiles, as
attention kernels do (Milakov and Gimelshein 2018, Dao et al. 2022). plain.py computes the same in torch."""

import triton
import triton.language as tl

from unheard.engines.stacked.kernel_parts import at_work, changed, dot, inverse_root, moved_rows, word_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    delta, theta0, scale, run, step, num_steps, output, part_sum, part_peak, part_total,
    P: tl.constexpr, AT: tl.constexpr, LAYER: tl.constexpr, M: tl.constexpr,
    V: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, NB: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr,
    UNIT: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the softmax of one user over one split of the words, for all N positions.

    Writes the largest logit [N], the sum of exponentials [N], and the sum of exponential times word vector [N, D].
    `project_back` combines the splits. The word vectors are read once. Their columns are processed in two blocks of D1
    and D2 columns (96 = 64 + 32): one block of the next power of two, 128, would multiply more zeros. Grid: (splits,
    U)."""
    split, u = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    r = tl.load(run + u).to(tl.int64)
    c = tl.load(scale + u * M + LAYER)
    n = tl.arange(0, NB)
    o1 = _rows(output + u * N * D, n, tl.arange(0, D1), N, D)
    summed1 = tl.zeros([NB, D1], tl.float32)
    if D2 > 0:
        o2 = _rows(output + u * N * D, n, D1 + tl.arange(0, D2), N, D)
        summed2 = tl.zeros([NB, D2], tl.float32)
    peak = tl.full([NB], -1e30, tl.float32)
    total = tl.zeros([NB], tl.float32)
    tiles: tl.constexpr = (V + BV - 1) // BV
    each: tl.constexpr = (tiles + SPLITS - 1) // SPLITS
    for tile in range(each):
        v = (split * each + tile) * BV + tl.arange(0, BV)
        e1 = word_rows(delta + u * P + AT, theta0 + r * P + AT, c, v, tl.arange(0, D1), v < V, D, FRESH)
        inverse = tl.full([BV], 1.0, tl.float32)
        if D2 > 0:
            e2 = word_rows(delta + u * P + AT, theta0 + r * P + AT, c, v, D1 + tl.arange(0, D2), v < V, D, FRESH)
        if UNIT:
            square = tl.sum(e1 * e1, 1)
            if D2 > 0:
                square += tl.sum(e2 * e2, 1)
            inverse = inverse_root(square)
        w1 = (e1 * inverse[:, None]).to(output.dtype.element_ty)
        logit = dot(o1, tl.trans(w1), PRECISION, UPCAST)
        if D2 > 0:
            w2 = (e2 * inverse[:, None]).to(output.dtype.element_ty)
            logit += dot(o2, tl.trans(w2), PRECISION, UPCAST)
        # Base 2, because GPUs have an instruction for exp2.
        logit = tl.where((v < V)[None, :], logit * LOG2_E, -float("inf"))
        higher = tl.maximum(peak, tl.max(logit, 1))
        p = tl.exp2(logit - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(p, 1)
        p = p.to(output.dtype.element_ty)
        summed1 = summed1 * fade[:, None] + dot(p, w1, PRECISION, UPCAST)
        if D2 > 0:
            summed2 = summed2 * fade[:, None] + dot(p, w2, PRECISION, UPCAST)
        peak = higher
    at = (u * SPLITS + split) * N + n
    tl.store(part_peak + at, peak / LOG2_E, mask=n < N)
    tl.store(part_total + at, total, mask=n < N)
    d = tl.arange(0, D1)
    tl.store(part_sum + at[:, None] * D + d[None, :], summed1, mask=(n < N)[:, None] & (d < D)[None, :])
    if D2 > 0:
        d = D1 + tl.arange(0, D2)
        tl.store(part_sum + at[:, None] * D + d[None, :], summed2, mask=(n < N)[:, None] & (d < D)[None, :])


@triton.jit
def update_table(
    delta, theta0, scale, run, step, num_steps, rate, keep, targets, share, output, log_sum, squares, U,
    P: tl.constexpr, AT: tl.constexpr, LAYER: tl.constexpr, M: tl.constexpr, SLOTS: tl.constexpr, SLOT: tl.constexpr,
    V: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr,
    DENSE: tl.constexpr, UNIT: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Update TILES tiles of a word table of one user: delta <- c * keep * delta - eta * gradient, [BV, D] per tile.

    The gradient is (p - 1 at the target)^T o; with unit norms, the derivative of the normalisation is applied too. Also
    writes the squared norm of the new delta. Positions are processed in two blocks of N1 and N2 (80 = 64 + 16), as
    columns are in `attend`. Without DENSE (an input table that is not tied) the delta is only multiplied by c * keep.
    Grid: (groups of tiles, U)."""
    u = tl.program_id(1).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    now = tl.load(step)
    r = tl.load(run + u).to(tl.int64)
    c = tl.load(scale + u * M + LAYER)
    left = c * tl.load(keep + r)
    of_user, of_start = delta + u * P + AT, theta0 + r * P + AT
    if DENSE:
        eta = tl.load(rate + r) * tl.load(share + now * U + u)
        of_batch, of_output = targets + (now.to(tl.int64) * U + u) * N, output + u * N * D
        n = tl.arange(0, N1)
        o11 = _rows(of_output, n, tl.arange(0, D1), N, D)
        if D2 > 0:
            o12 = _rows(of_output, n, D1 + tl.arange(0, D2), N, D)
        lse1, target1 = _predicted(of_batch, log_sum + u * N, n, N)
        if N2 > 0:
            n = N1 + tl.arange(0, N2)
            o21 = _rows(of_output, n, tl.arange(0, D1), N, D)
            if D2 > 0:
                o22 = _rows(of_output, n, D1 + tl.arange(0, D2), N, D)
            lse2, target2 = _predicted(of_batch, log_sum + u * N, n, N)
    square = tl.zeros([BV], tl.float32)
    for k in range(TILES):
        v = (tl.program_id(0) * TILES + k) * BV + tl.arange(0, BV)
        d = tl.arange(0, D1)
        at1 = of_user + v[:, None] * D + d[None, :]
        here1 = (v < V)[:, None] & (d < D)[None, :]
        old1 = changed(at1, here1, FRESH)
        if D2 > 0:
            d = D1 + tl.arange(0, D2)
            at2 = of_user + v[:, None] * D + d[None, :]
            here2 = (v < V)[:, None] & (d < D)[None, :]
            old2 = changed(at2, here2, FRESH)
        if DENSE:
            w1 = moved_rows(old1, of_start, c, v, tl.arange(0, D1), v < V, D)
            inverse = tl.full([BV], 1.0, tl.float32)
            inverse2 = inverse
            if D2 > 0:
                w2 = moved_rows(old2, of_start, c, v, D1 + tl.arange(0, D2), v < V, D)
            if UNIT:
                inverse = tl.sum(w1 * w1, 1)
                if D2 > 0:
                    # The sum is computed twice, so that each block of columns has it in its own layout of threads.
                    square2 = tl.sum(w2 * w2, 1)
                    inverse2 = inverse_root(square2 + inverse)
                    inverse += square2
                inverse = inverse_root(inverse)
            w1 = (w1 * inverse[:, None]).to(output.dtype.element_ty)
            logit = dot(w1, tl.trans(o11), PRECISION, UPCAST)
            if D2 > 0:
                w2 = (w2 * inverse2[:, None]).to(output.dtype.element_ty)
                logit += dot(w2, tl.trans(o12), PRECISION, UPCAST)
            dlogit1, outward = _softmax_gradient(logit, lse1, target1, v, output.dtype.element_ty)
            if N2 > 0:
                logit = dot(w1, tl.trans(o21), PRECISION, UPCAST)
                if D2 > 0:
                    logit += dot(w2, tl.trans(o22), PRECISION, UPCAST)
                dlogit2, more = _softmax_gradient(logit, lse2, target2, v, output.dtype.element_ty)
                outward += more
            pace = eta * inverse
            # The two blocks of columns are computed one after the other: both at once need too many registers.
            gradient = dot(dlogit1, o11, PRECISION, UPCAST)
            if N2 > 0:
                gradient += dot(dlogit2, o21, PRECISION, UPCAST)
            if UNIT:
                gradient -= outward[:, None] * w1.to(tl.float32)
            square += _put(at1, here1, left * old1 - pace[:, None] * gradient)
            if D2 > 0:
                gradient = dot(dlogit1, o12, PRECISION, UPCAST)
                if N2 > 0:
                    gradient += dot(dlogit2, o22, PRECISION, UPCAST)
                if UNIT:
                    gradient -= outward[:, None] * w2.to(tl.float32)
                square += _put(at2, here2, left * old2 - pace[:, None] * gradient)
        else:
            square += _put(at1, here1, left * old1)
            if D2 > 0:
                square += _put(at2, here2, left * old2)
    tl.store(squares + u * SLOTS + SLOT + tl.program_id(0), tl.sum(square))


@triton.jit
def update_read(
    delta, run, step, num_steps, rate, tokens, input_grad, squares, U,
    P: tl.constexpr, SLOTS: tl.constexpr, SLOT: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    DB: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Update the rows of the input words: delta[word] -= eta * (sum of dl/dx over the positions of the word).

    A program handles BN positions of one user. A word is updated once, by the program of its first position. Also
    writes the change of the squared norm. `input_gradients` has already applied the derivative of the normalisation to
    dl/dx. Grid: (blocks of positions, U)."""
    u = tl.program_id(1).to(tl.int64)
    if not at_work(step, num_steps, u):
        return
    eta = tl.load(rate + tl.load(run + u))
    of_batch = tokens + (tl.load(step).to(tl.int64) * U + u) * N
    n, m, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, NB), tl.arange(0, DB)
    word = tl.load(of_batch + n, mask=n < N, other=-1)
    same = (word[:, None] == tl.load(of_batch + m, mask=m < N, other=-2)[None, :]).to(tl.int32)
    is_first = (tl.sum(tl.where(m[None, :] < n[:, None], same, 0), 1) == 0) & (n < N)
    dx = tl.load(
        input_grad + (u * N + m)[:, None] * D + d[None, :], mask=(m < N)[:, None] & (d < D)[None, :], other=0.0
    )
    gradient = dot(same.to(tl.float32).to(input_grad.dtype.element_ty), dx, PRECISION, UPCAST)
    here = is_first[:, None] & (d < D)[None, :]
    at = delta + u * P + word[:, None] * D + d[None, :]
    old = tl.load(at, mask=here, other=0.0).to(tl.float32)
    stored = (old - eta * gradient).to(delta.dtype.element_ty)
    tl.store(at, stored, mask=here)
    kept = tl.where(here, stored.to(tl.float32), 0.0)
    tl.store(squares + u * SLOTS + SLOT + tl.program_id(0), tl.sum(kept * kept - old * old))


@triton.jit
def _rows(table, n, d, N: tl.constexpr, D: tl.constexpr):
    """Return rows n and columns d of a table [N, D]; zero outside of the table."""
    return tl.load(table + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _predicted(of_batch, log_sum, n, N: tl.constexpr):
    """Return the base-2 log of the sum of exponentials, and the target, of the positions n.

    At positions without a target the log is infinite, so that every probability is 0."""
    target = tl.load(of_batch + n, mask=n < N, other=-1)
    lse = tl.load(log_sum + n, mask=n < N, other=0.0)
    return tl.where(target >= 0, lse * LOG2_E, float("inf")), target


@triton.jit
def _softmax_gradient(logit, lse, target, v, dtype: tl.constexpr):
    """Return dl/dlogit (p, and p - 1 at the target) for a tile of words and some positions, and its radial part.

    The radial part of each word's gradient is the sum over positions of dlogit * logit. The derivative of the
    normalisation removes it."""
    p = tl.exp2(logit * LOG2_E - lse[None, :])
    dlogit = tl.where(target[None, :] == v[:, None], p - 1.0, p)
    return dlogit.to(dtype), tl.sum(dlogit * logit, 1)


@triton.jit
def _put(at, here, new):
    """Store a tile of a delta. Return the squared norms of the stored rows, after rounding to the type of the delta."""
    stored = new.to(at.dtype.element_ty)
    tl.store(at, stored, mask=here)
    kept = tl.where(here, stored.to(tl.float32), 0.0)
    return tl.sum(kept * kept, 1)
