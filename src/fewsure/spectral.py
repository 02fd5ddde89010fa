"""The soft spectral bound: a weight shrinks when its spectral norm exceeds `c`, and is left alone below.

The norm is that of the flattened kernel (the paper: c = 3). Power iteration is advanced one step an optimiser step, by
the training loop and not by `forward`, so that evaluating a model never changes it. `fold` makes the bound permanent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
WARM_UP = 15  # power steps at the start, from a random direction


class SoftBound(nn.Module):
    """The parametrisation `W -> W / max(1, sigma(W) / c)` with running singular vectors `u` and `v`."""

    u: Tensor
    v: Tensor

    def __init__(self, weight: Float[Tensor, "out *rest"], c: float) -> None:
        super().__init__()
        matrix = weight.detach().flatten(1)
        self.c = c
        self.register_buffer("u", nn.functional.normalize(torch.randn_like(matrix[:, 0]), dim=0))
        self.register_buffer("v", nn.functional.normalize(torch.randn_like(matrix[0]), dim=0))
        for _ in range(WARM_UP):
            self.power_step(weight)

    @torch.no_grad()
    def power_step(self, weight: Float[Tensor, "out *rest"]) -> None:
        matrix = weight.flatten(1)
        self.v.copy_(nn.functional.normalize(self.u @ matrix, dim=0))
        self.u.copy_(nn.functional.normalize(matrix @ self.v, dim=0))

    def norm(self, weight: Float[Tensor, "out *rest"]) -> Float[Tensor, ""]:
        """The estimate u^T W v of the spectral norm; its gradient treats u and v as constants."""
        return torch.einsum("i,ij,j->", self.u, weight.flatten(1), self.v)

    def forward(self, weight: Float[Tensor, "out *rest"]) -> Float[Tensor, "out *rest"]:
        return weight / (self.norm(weight) / self.c).clamp_min(1.0)


def bound(module: Layer, c: float | None = 3.0) -> Layer:
    """Bound a linear or convolutional layer's weight; `c=None` leaves it as it is.

    >>> layer = bound(nn.Linear(8, 8), c=0.5)
    >>> bool(torch.linalg.matrix_norm(layer.weight, 2) < 0.51)
    True
    """
    if c is not None:
        parametrize.register_parametrization(module, "weight", SoftBound(module.weight, c))
    return module


def bounded(model: nn.Module) -> Iterator[tuple[SoftBound, Tensor]]:
    """Every bound in a model with the raw weight that it holds down."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parts = module.get_submodule("parametrizations.weight")
            for part in parts.children():
                if isinstance(part, SoftBound):
                    yield part, parts.get_parameter("original")


def step(model: nn.Module) -> None:
    """One power step of every bound: the training loop calls it after the optimiser's step."""
    for part, weight in bounded(model):
        part.power_step(weight)


def fold(model: nn.Module) -> None:
    """Replace every bounded weight, in place, by its bounded value: the same answers, an ordinary layer."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
