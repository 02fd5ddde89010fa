"""Gaussians with diagonal plus low-rank covariance, `Sigma = diag(lambda) + Phi Phi^T`, and the task they make.

Nothing else in the package knows this algebra. With the Cholesky factor `L L^T = I + Phi^T Lambda^-1 Phi` and
`S = L^-1 Phi^T Lambda^-1`,

    d2 = sum(dz^2 / lambda) - |S dz|^2,   logdet Sigma = sum(log lambda) + 2 sum(log diag L).

Queries meet all classes in a few matrix products, `d (r + 2)` multiply-adds a query and class, and nothing as large as
[classes, queries, features] is ever made. The difference of squares is taken in float64, centred on the mean of the
means: it keeps more digits than a sum of squares does in float32, whatever the size of the factors. With more factors
than features, Sigma itself is factorised: `S = L^-1` and `d2 = |S dz|^2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from fewsure.errors import FewsureError
from fewsure.task import Prediction, Task


@dataclass(frozen=True, eq=False)
class Gaussians:
    """Batches of `n` Gaussians. `diag` and `factors` may have size 1 where all of them share one covariance."""

    mean: Float[Tensor, "*b n d"]
    diag: Float[Tensor, "*b #n d"]
    factors: Float[Tensor, "*b #n d r"]

    @property
    def rank(self) -> int:
        return self.factors.shape[-1]

    @property
    def _wide(self) -> bool:
        """More factors than features: the d x d matrix is the smaller."""
        return self.rank > self.factors.shape[-2]

    @cached_property
    def _solved(self) -> tuple[Float[Tensor, "*b #n s d"], Float[Tensor, "*b #n"]]:
        """In float64, `L^-1 Phi^T Lambda^-1` (or `L^-1`, of the dense covariance) and `log |Sigma|`."""
        diag, factors = self.diag.double(), self.factors.double()
        logdet = diag.log().sum(-1)
        if self.rank == 0:
            return factors.mT, logdet
        if self._wide:
            root = _root(torch.diag_embed(diag) + factors @ factors.mT)
            identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand_as(root)
            solved = torch.linalg.solve_triangular(root, identity, upper=False)
            return solved, 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        a = factors.mT / diag.unsqueeze(-2)
        identity = torch.eye(self.rank, dtype=a.dtype, device=a.device)
        root = _root(identity + a @ factors)
        solved = torch.linalg.solve_triangular(root, a, upper=False)
        return solved, logdet + 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @cached_property
    def _ready(self) -> tuple[Tensor, ...]:
        """What every query meets, in float64: a centre, `1 / lambda`, its products with the means, and where `solved`
        takes the means."""
        mean, precise, (solved, _) = self.mean.double(), self.diag.double().reciprocal(), self._solved
        centre = mean.mean(-2, keepdim=True)
        mean = mean - centre
        shared = solved.shape[-3] == 1
        at_mean = mean @ solved.squeeze(-3).mT if shared else (solved @ mean.unsqueeze(-1)).squeeze(-1)
        linear = -2 * mean * precise
        return centre, precise.expand_as(mean), linear, (mean.square() * precise).sum(-1, keepdim=True), at_mean

    @property
    def logdet(self) -> Float[Tensor, "*b #n"]:
        """log |Sigma| (Eq. 9 of the paper, the determinant lemma, for all factors at once)."""
        return self._solved[1].to(self.diag.dtype)

    def squared_distance(self, z: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b n q"]:
        """(z - mean)^T Sigma^-1 (z - mean)."""
        if z.shape[-1] != self.mean.shape[-1]:
            raise FewsureError(
                f"queries have {z.shape[-1]} features and the support had {self.mean.shape[-1]}: "
                "embed both with the same method"
            )
        centre, precise, linear, constant, at_mean = self._ready
        dz = z.double() - centre
        distance = precise @ dz.square().mT + (linear @ dz.mT + constant)
        if self.rank:
            solved, _ = self._solved
            y = (dz @ solved.flatten(-3, -2).mT).unflatten(-1, solved.shape[-3:-1]) - at_mean.unsqueeze(-3)
            inside = y.square().sum(-1).mT
            distance = inside if self._wide else distance - inside
        return distance.clamp_min(0).to(self.diag.dtype)

    def log_density(self, z: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b n q"]:
        """log N(z; mean, Sigma) without the constant `d/2 log 2 pi`, which every class shares."""
        return -0.5 * (self.squared_distance(z) + self.logdet.unsqueeze(-1))

    def covariance(self) -> Float[Tensor, "*b #n d d"]:
        """Sigma (Eq. 5 of the paper), dense."""
        return torch.diag_embed(self.diag) + self.factors @ self.factors.mT

    def precision(self) -> Float[Tensor, "*b #n d d"]:
        """Sigma^-1, dense: `Lambda^-1 - S^T S` with `S` as `_solved` has it, the Woodbury identity."""
        square = self._solved[0].mT @ self._solved[0]
        if not self._wide:
            square = torch.diag_embed(self.diag.double().reciprocal()) - square
        return square.to(self.diag.dtype)

    def eigenvalues(self) -> Float[Tensor, "*b #n d"]:
        """Eigenvalues of Sigma, ascending; those of the precision are their reciprocals."""
        dense = torch.diag_embed(self.diag.double()) + self.factors.double() @ self.factors.double().mT
        return torch.linalg.eigvalsh(dense).to(self.diag.dtype)


def _root(matrix: Float[Tensor, "*b s s"]) -> Float[Tensor, "*b s s"]:
    """The Cholesky factor, or NaN where rounding has left none: unlike `cholesky`, it does not wait for the device."""
    root, failed = torch.linalg.cholesky_ex(matrix)
    return torch.where((failed > 0)[..., None, None], torch.nan, root)


@dataclass(frozen=True, eq=False)
class GaussianTask(Task):
    """One Gaussian a class and, optionally, one for the background of all classes: the task of every metric method.

    The logits are Eq. 7's, `-d2/2 - logdet/2`; the energy is `-logsumexp(-d2)`, of squared distances without the half
    and the determinant, as in Eq. 10. Without a background Gaussian the background is flat.
    """

    mean: Float[Tensor, "e n d"]
    diag: Float[Tensor, "e #n d"]
    factors: Float[Tensor, "e #n d r"]
    background_mean: Float[Tensor, "e d"] | None = None
    background_diag: Float[Tensor, "e d"] | None = None

    @cached_property
    def classes(self) -> Gaussians:
        return Gaussians(self.mean, self.diag, self.factors)

    @cached_property
    def background(self) -> Gaussians | None:
        if self.background_mean is None or self.background_diag is None:
            return None
        none = self.background_diag.new_zeros(*self.background_diag.shape, 0)
        return Gaussians(self.background_mean.unsqueeze(1), self.background_diag.unsqueeze(1), none.unsqueeze(1))

    def __call__(self, query: Float[Tensor, "e q d"]) -> Prediction:
        distance = self.classes.squared_distance(query)  # [e n q]
        logits = -0.5 * (distance + self.classes.logdet.unsqueeze(-1))
        background = None if self.background is None else self.background.log_density(query).squeeze(1)
        return Prediction.of(logits.mT, energy=-(-distance).logsumexp(1), background=background)
