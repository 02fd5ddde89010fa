"""Gaussians with diagonal plus low-rank covariance, `Sigma = diag(lambda) + Phi Phi^T`, and the task they make.

Nothing else in the package knows this algebra. Everything happens in whitened space, `x = Lambda^-1/2 dz` and
`B = Lambda^-1/2 Phi`. With the Cholesky factor `L L^T = I + B^T B` and `P = L^-1 B^T`,

    d2 = |x - P^T P x|^2 + |L^-T P x|^2,   logdet Sigma = sum(log lambda) + logdet(I + B^T B).

The distance is a sum of squares: never negative. `P` and `L^-1` are parts of an orthogonal matrix, so that rounding
moves what is squared by no more than some units in the last place of |x|, whatever the size of the factors; forms that
subtract squares, or that multiply by Phi, lose digits where Phi is large. The small matrices are made and factorised in
float64: in float32, factors of size 1e3 make the Cholesky fail. With more factors than features, `I + B B^T` is
factorised in place of `I + B^T B`, and `d2 = |L^-1 x|^2`.
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

    @property
    def _wide(self) -> bool:
        """More factors than features: the d x d matrix is the smaller."""
        return self.rank > self.factors.shape[-2]

    @cached_property
    def _whitened(self) -> Float[Tensor, "*#b d r"]:
        """`B` in float64."""
        return self.factors.double() * self.diag.double().rsqrt().unsqueeze(-1)

    @cached_property
    def _inverse_root(self) -> Float[Tensor, "*#b s s"]:
        """`L^-1` in float64, of the smaller matrix."""
        b = self._whitened
        gram = b @ b.mT if self._wide else b.mT @ b
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        # cholesky_ex does not wait for the device as cholesky does; the matrix is positive definite.
        root = torch.linalg.cholesky_ex(identity + gram).L
        return torch.linalg.solve_triangular(root, identity.expand_as(gram), upper=False)

    @cached_property
    def _projection(self) -> Float[Tensor, "*#b s d"]:
        """In float64, `P`, or `L^-1` where the matrix is d x d."""
        if self._wide:
            return self._inverse_root
        return self._inverse_root @ self._whitened.mT

    @cached_property
    def _ready(self) -> tuple[Float[Tensor, "*#b s d"], Float[Tensor, "*#b s s"]]:
        """What every query is multiplied by, once for all of them."""
        return self._projection.to(self.diag.dtype), self._inverse_root.to(self.diag.dtype)

    @property
    def logdet(self) -> Float[Tensor, "*#b"]:
        """log |Sigma| (Eq. 9 of the paper, the determinant lemma, for all factors at once)."""
        growth = self._inverse_root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return (self.diag.double().log().sum(-1) - 2 * growth).to(self.diag.dtype)

    def squared_distance(self, z: Float[Tensor, "*#b q d"]) -> Float[Tensor, "*b q"]:
        """(z - mean)^T Sigma^-1 (z - mean)."""
        if z.shape[-1] != self.mean.shape[-1]:
            raise FewsureError(
                f"queries have {z.shape[-1]} features and the support had {self.mean.shape[-1]}: "
                "embed both with the same method"
            )
        # Subtracting first keeps a large common offset from eating the digits of the difference.
        x = (z - self.mean.unsqueeze(-2)) * self.diag.rsqrt().unsqueeze(-2)
        if self.rank == 0:
            return x.square().sum(-1)
        projection, inverse_root = self._ready
        y = x @ projection.mT
        if self._wide:
            return y.square().sum(-1)
        return (x - y @ projection).square().sum(-1) + (y @ inverse_root).square().sum(-1)

    def log_density(self, z: Float[Tensor, "*#b q d"]) -> Float[Tensor, "*b q"]:
        """log N(z; mean, Sigma) without the constant `d/2 log 2 pi`, which every class shares."""
        return -0.5 * (self.squared_distance(z) + self.logdet.unsqueeze(-1))

    def covariance(self) -> Float[Tensor, "*#b d d"]:
        """Sigma (Eq. 5 of the paper), dense."""
        return torch.diag_embed(self.diag) + self.factors @ self.factors.mT

    def precision(self) -> Float[Tensor, "*#b d d"]:
        """Sigma^-1, dense: `Lambda^-1/2 (I - P^T P) Lambda^-1/2`, the Woodbury identity."""
        square = self._projection.mT @ self._projection
        if not self._wide:
            square = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device) - square
        scale = self.diag.double().rsqrt()
        return (scale.unsqueeze(-1) * square * scale.unsqueeze(-2)).to(self.diag.dtype)

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
