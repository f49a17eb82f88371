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
def word_rows(delta, theta0, c, v, d, wanted, D: tl.constexpr):
    """theta0 + c * delta for the words v, float32 [words, DB]; zero where not wanted."""
    old = tl.load(delta + v[:, None] * D + d[None, :], mask=wanted[:, None] & (d < D)[None, :], other=0.0)
    return moved_rows(old, theta0, c, v, d, wanted, D)


@triton.jit
def moved_rows(old, theta0, c, v, d, wanted, D: tl.constexpr):
    """theta0 + c * old."""
    start = tl.load(theta0 + v[:, None] * D + d[None, :], mask=wanted[:, None] & (d < D)[None, :], other=0.0)
    return start.to(tl.float32) + c * old.to(tl.float32)


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
