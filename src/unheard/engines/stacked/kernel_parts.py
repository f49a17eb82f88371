"""Functions that several Triton kernels use: products in a given precision, and tiles of parameters.

In all kernels `c` is the factor of the clip of the previous local step, which is applied when a delta is read. FRESH is
set in the first local step, in which all deltas are zero. UPCAST is set for Triton's interpreter on a CPU, which has no
products in bfloat16.
"""

import triton
import triton.language as tl


@triton.jit
def at_work(step, num_steps, u):
    """Whether user u takes this local step. If not, the user has finished, and the program returns."""
    return tl.load(step) < tl.load(num_steps + u)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Return a @ b, summed in float32.

    With UPCAST the factors are converted to float32 first. They are already rounded to bfloat16, so the result is the
    same.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def changed(delta, here, FRESH: tl.constexpr):
    """Return a block of a delta, float32. In the first local step (FRESH) return zeros without reading the memory."""
    if FRESH:
        # DP: in the first local step the memory still holds the deltas of other users.
        return tl.zeros(here.shape, tl.float32)
    return tl.load(delta, mask=here, other=0.0).to(tl.float32)


@triton.jit
def word_rows(delta, theta0, c, v, d, wanted, D: tl.constexpr, FRESH: tl.constexpr):
    """Return theta0 + c * delta of the words v in the columns d, float32; zero for words that are not `wanted`."""
    old = changed(delta + v[:, None] * D + d[None, :], wanted[:, None] & (d < D)[None, :], FRESH)
    return moved_rows(old, theta0, c, v, d, wanted, D)


@triton.jit
def moved_rows(old, theta0, c, v, d, wanted, D: tl.constexpr):
    """Return theta0 + c * old of the words v in the columns d, float32, where `old` is their delta.

    theta0 counts as zero for words that are not `wanted`; `old` must be zero there.
    """
    start = tl.load(theta0 + v[:, None] * D + d[None, :], mask=wanted[:, None] & (d < D)[None, :], other=0.0)
    return start.to(tl.float32) + c * old


@triton.jit
def matrix_block(delta, theta0, scale, layer, at, here, FRESH: tl.constexpr):
    """Return theta0 + c * delta for a block of a matrix, in the precision of the products.

    `delta` and `theta0` point to the parameters of one user and of the user's run, `at` has the offsets of the block in
    both, and `scale + layer` points to c.
    """
    start = tl.load(theta0 + at, mask=here, other=0.0)
    if FRESH:
        return start
    moved = start.to(tl.float32) + tl.load(scale + layer) * changed(delta + at, here, FRESH)
    return moved.to(theta0.dtype.element_ty)


@triton.jit
def state_weights(middle, run, u, MIDDLE: tl.constexpr, FRESH: tl.constexpr):
    """Return a pointer to the gates' matrices of user u; in the first local step to those of the run in theta0."""
    if FRESH:
        return middle + tl.load(run + u).to(tl.int64) * MIDDLE
    return middle + u * MIDDLE


@triton.jit
def inverse_root(square):
    """Return 1 / norm from the squared norm, with the same lower bound as `on_the_sphere` in models/recurrent.py."""
    return 1.0 / tl.sqrt(tl.maximum(square, 1e-24))


@triton.jit
def sphere(rows):
    """Return 1 / norm of each row."""
    return inverse_root(tl.sum(rows * rows, 1))


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, computed from the sigmoid: Triton's language has no tanh."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0
