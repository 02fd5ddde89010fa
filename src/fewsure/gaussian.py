"""Gaussians with diagonal plus low-rank covariance, `Sigma = diag(lambda) + Phi Phi^T`, and the task they make.

Nothing else in the package knows this algebra. With `A = Phi^T Lambda^-1` and `C = I + A Phi`,

    y = C^-1 A dz,   d2 = sum((dz - Phi y)^2 / lambda) + |y|^2,   logdet Sigma = sum(log lambda) + logdet C.

The distance is a sum of squares: never negative, and in single precision it keeps digits that
`dz^T Lambda^-1 dz - ...` loses. Small matrices are made and factorised in float64: in plain float32, factors of size
1e3 make the Cholesky fail. With more factors than features the d x d covariance is factorised in place of C, by
`C^-1 A = Phi^T Sigma^-1`.
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
    """A batch of Gaussians. `diag` and `factors` may have size 1 where all classes share one covariance."""

    mean: Float[Tensor, "*b d"]
    diag: Float[Tensor, "*#b d"]
    factors: Float[Tensor, "*#b d r"]

    @property
    def rank(self) -> int:
        return self.factors.shape[-1]

    @cached_property
    def _solved(self) -> tuple[Float[Tensor, "*#b r d"], Float[Tensor, "*#b"]]:
        """`C^-1 A` and `logdet Sigma`, once for all queries."""
        diag, factors = self.diag.double(), self.factors.double()
        logdet = diag.log().sum(-1)
        if self.rank == 0:
            return self.factors.mT, logdet.to(self.diag.dtype)
        # cholesky_ex does not wait for the device as cholesky does; both matrices are positive definite.
        if self.rank <= factors.shape[-2]:
            a = factors.mT / diag.unsqueeze(-2)
            identity = torch.eye(self.rank, dtype=a.dtype, device=a.device)
            root = torch.linalg.cholesky_ex(identity + a @ factors).L
            solved = torch.cholesky_solve(a, root)
            logdet = logdet + 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        else:
            root = torch.linalg.cholesky_ex(torch.diag_embed(diag) + factors @ factors.mT).L
            solved = torch.cholesky_solve(factors, root).mT
            logdet = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return solved.to(self.diag.dtype), logdet.to(self.diag.dtype)

    @property
    def logdet(self) -> Float[Tensor, "*#b"]:
        """log |Sigma| (Eq. 9 of the paper, the determinant lemma, for all factors at once)."""
        return self._solved[1]

    def squared_distance(self, z: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q"]:
        """(z - mean)^T Sigma^-1 (z - mean)."""
        if z.shape[-1] != self.mean.shape[-1]:
            raise FewsureError(
                f"queries have {z.shape[-1]} features and the support had {self.mean.shape[-1]}: "
                "embed both with the same method"
            )
        # Subtracting first keeps a large common offset from eating the digits of the difference.
        dz = z - self.mean.unsqueeze(-2)
        scale = self.diag.unsqueeze(-2).reciprocal()
        if self.rank == 0:
            return (dz.square() * scale).sum(-1)
        solved, _ = self._solved
        y = dz @ solved.mT
        rest = dz - y @ self.factors.mT
        return (rest.square() * scale).sum(-1) + y.square().sum(-1)

    def log_density(self, z: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q"]:
        """log N(z; mean, Sigma) without the constant `d/2 log 2 pi`, which every class shares."""
        return -0.5 * (self.squared_distance(z) + self.logdet.unsqueeze(-1))

    def covariance(self) -> Float[Tensor, "*#b d d"]:
        """Sigma (Eq. 5 of the paper), dense."""
        return torch.diag_embed(self.diag) + self.factors @ self.factors.mT

    def precision(self) -> Float[Tensor, "*#b d d"]:
        """Sigma^-1, dense, by the Woodbury identity `Lambda^-1 (I - Phi C^-1 A)`."""
        solved, _ = self._solved
        identity = torch.eye(self.diag.shape[-1], dtype=torch.float64, device=self.diag.device)
        dense = (identity - self.factors.double() @ solved.double()) / self.diag.double().unsqueeze(-1)
        return (0.5 * (dense + dense.mT)).to(self.diag.dtype)

    def eigenvalues(self) -> Float[Tensor, "*#b d"]:
        """Eigenvalues of Sigma, ascending; those of the precision are their reciprocals."""
        dense = torch.diag_embed(self.diag.double()) + self.factors.double() @ self.factors.double().mT
        return torch.linalg.eigvalsh(dense).to(self.diag.dtype)


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
        return Gaussians(self.background_mean, self.background_diag, none)

    def __call__(self, query: Float[Tensor, "e q d"]) -> Prediction:
        distance = self.classes.squared_distance(query.unsqueeze(1))  # [e n q]
        logits = -0.5 * (distance + self.classes.logdet.unsqueeze(-1))
        background = None if self.background is None else self.background.log_density(query)
        return Prediction.of(logits.mT, energy=-(-distance).logsumexp(1), background=background)
