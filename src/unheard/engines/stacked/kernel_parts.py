"""Functions that the Triton kernels share: products in a given precision, tiles of word vectors."""

import triton
import triton.language as tl


@triton.jit
def at_work(step, num_steps, u):
    """Whether user u takes this local step; a program of a user who has finished returns at once."""
    return tl.load(step) < tl.load(num_steps + u)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b summed in float32.

    UPCAST is for Triton's interpreter, which has no bfloat16 product (the factors are rounded already).
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def changed(delta, here, FRESH: tl.constexpr):
    """A block of a delta, float32. In the first local step (FRESH) it is zero and is not read."""
    if FRESH:
        # DP: what the memory holds then belongs to other users.
        return tl.zeros(here.shape, tl.float32)
    return tl.load(delta, mask=here, other=0.0).to(tl.float32)


@triton.jit
def word_rows(delta, theta0, c, v, d, wanted, D: tl.constexpr, FRESH: tl.constexpr):
    """theta0 + c * delta for the words v, float32 [words, DB]; zero where not wanted."""
    old = changed(delta + v[:, None] * D + d[None, :], wanted[:, None] & (d < D)[None, :], FRESH)
    return moved_rows(old, theta0, c, v, d, wanted, D)


@triton.jit
def moved_rows(old, theta0, c, v, d, wanted, D: tl.constexpr):
    """theta0 + c * old."""
    start = tl.load(theta0 + v[:, None] * D + d[None, :], mask=wanted[:, None] & (d < D)[None, :], other=0.0)
    return start.to(tl.float32) + c * old


@triton.jit
def matrix_block(delta, theta0, scale, layer, at, here, FRESH: tl.constexpr):
    """theta0 + c * delta for a block of a matrix, in the precision of the products; c is the layer's pending clip.

    `delta` and `theta0` are those of one user, and `at` is relative to both."""
    start = tl.load(theta0 + at, mask=here, other=0.0)
    if FRESH:
        return start
    moved = start.to(tl.float32) + tl.load(scale + layer) * changed(delta + at, here, FRESH)
    return moved.to(theta0.dtype.element_ty)


@triton.jit
def state_weights(middle, run, u, MIDDLE: tl.constexpr, FRESH: tl.constexpr):
    """Where the gates' weights on the state are, of user u; in the first local step those of the user's run, in theta0."""
    if FRESH:
        return middle + tl.load(run + u).to(tl.int64) * MIDDLE
    return middle + u * MIDDLE


@triton.jit
def inverse_root(square):
    """1 / norm from the squared norm, with the floor of models/recurrent.py `on_the_sphere`."""
    return 1.0 / tl.sqrt(tl.maximum(square, 1e-24))


@triton.jit
def sphere(rows):
    """1 / norm of each row."""
    return inverse_root(tl.sum(rows * rows, 1))


@triton.jit
def tanh(x):
    """The hyperbolic tangent by the sigmoid, which is an instruction."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0
