"""How far one user may move the model: flat, per layer, or not at all.

In: deltas [.., P]. Out: the same, with ||delta|| <= S. Where in the paper: FlatClip and PerLayerClip of Algorithm 1, equation 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unheard.errors import InvalidValue
from unheard.parameters import Layout
from unheard.parts import nearest, require, require_positive


@dataclass(frozen=True)
class Ball:
    """A stretch of the flat vector and the largest norm allowed to it."""

    where: slice
    radius: float


@dataclass(frozen=True, kw_only=True)
class FlatClip:
    """The whole update has norm at most S."""

    norm: float

    def __post_init__(self) -> None:
        require_positive(norm=self.norm)

    def balls(self, layout: Layout) -> list[Ball]:
        return [Ball(slice(0, layout.total), self.norm)]

    def l2_bound(self, layout: Layout) -> float:
        return self.norm

    def at_norm(self, norm: float) -> "FlatClip":
        return replace(self, norm=norm)

    def __str__(self) -> str:
        return f"flat, S = {self.norm:g}"


@dataclass(frozen=True, kw_only=True)
class PerLayerClip:
    """Each of the m layers has its own bound: S_j = norm / sqrt(m), or `norms` by layer. S = sqrt(sum of S_j^2)."""

    norm: float | None = None
    norms: dict[str, float] | None = None

    def __post_init__(self) -> None:
        require(
            (self.norm is None) != (self.norms is None),
            "give exactly one of norm (shared out equally) and norms (by layer).",
        )
        require_positive(norm=self.norm)
        for bound in (self.norms or {}).values():
            require_positive(norms=bound)

    def __hash__(self) -> int:
        return hash((self.norm, tuple(sorted((self.norms or {}).items()))))

    def balls(self, layout: Layout) -> list[Ball]:
        return [Ball(layout.slices[name], radius) for name, radius in self._radii(layout).items()]

    def l2_bound(self, layout: Layout) -> float:
        # DP: S is the root of the sum of squares, not the largest S_j. fsum and nextafter: never below the true value.
        return math.nextafter(math.sqrt(math.fsum(r * r for r in self._radii(layout).values())), math.inf)

    def at_norm(self, norm: float) -> "PerLayerClip":
        """The same shares of another total S."""
        if self.norms is None:
            return replace(self, norm=norm)
        share = norm / math.sqrt(math.fsum(r * r for r in self.norms.values()))
        return replace(self, norms={name: r * share for name, r in self.norms.items()})

    def _radii(self, layout: Layout) -> dict[str, float]:
        if self.norms is None:
            assert self.norm is not None
            return dict.fromkeys(layout.names, self.norm / math.sqrt(len(layout)))
        for name in self.norms:
            if name not in layout.names:
                raise InvalidValue(
                    f"[clip.norms] names a layer '{name}' that the model lacks.{nearest(name, layout.names)}"
                )
        if missing := [name for name in layout.names if name not in self.norms]:
            raise InvalidValue(f"[clip.norms] lacks {', '.join(missing)}: every layer needs a bound.")
        return {name: self.norms[name] for name in layout.names}

    def __str__(self) -> str:
        return (
            f"per layer, S = {self.norm:g} shared equally" if self.norms is None else f"per layer, S_j = {self.norms}"
        )


@dataclass(frozen=True, kw_only=True)
class NoClip:
    """No bound: a non-private baseline."""

    def balls(self, layout: Layout) -> list[Ball]:
        return []

    def l2_bound(self, layout: Layout) -> float:
        return math.inf

    def at_norm(self, norm: float) -> "NoClip":
        raise InvalidValue(
            "A schedule sets clip_norm, but [clip] is 'none'. Start with a clip, or leave clip_norm out."
        )

    def __str__(self) -> str:
        return "none"


Clip = FlatClip | PerLayerClip | NoClip


def clip_(delta_UP: Tensor, balls: Sequence[Ball], unclipped_U: Tensor | None = None) -> Tensor:
    """delta * min(1, S / ||delta||) in place, ball by ball. Norms in float64. A NaN stays one, and is found later. Who is clipped
    is struck from `unclipped_U`."""
    for ball in balls:
        part_UL = delta_UP[..., ball.where]
        norm_U = torch.linalg.vector_norm(part_UL, dim=-1, keepdim=True, dtype=torch.float64)
        if unclipped_U is not None:
            unclipped_U &= ~(norm_U[..., 0] > ball.radius)
        # `where`, not min(1, S/norm): with a NaN the latter can come out as 1, which is no clip at all.
        part_UL.mul_(torch.where(norm_U > ball.radius, ball.radius / norm_U, 1.0).to(delta_UP.dtype))
    return delta_UP
