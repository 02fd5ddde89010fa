"""What the metric methods share: a backbone, prototypes, and a covariance that each estimates in its own way."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fewsure.errors import FewsureError
from fewsure.gaussian import GaussianTask
from fewsure.task import Method

Covariance = tuple[Float[Tensor, "e #n d"], Float[Tensor, "e #n d r"]]


class ClassGaussians(Method):
    """A method whose task is one Gaussian a class; a subclass supplies `covariance`."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.features: int = backbone.features  # pyright: ignore[reportAttributeAccessIssue]

    def embed(self, x: Float[Tensor, "e *items"]) -> Float[Tensor, "e *features"]:
        return self.backbone(x)

    def task(self, support: Float[Tensor, "e n k d"], mask: Bool[Tensor, "e n k"]) -> GaussianTask:
        if support.shape[3:] != (self.features,):
            raise FewsureError(
                f"support embeddings of shape {tuple(support.shape[3:])}: expected vectors of {self.features} "
                "features; embed them with this method"
            )
        prototypes = support.sum(2) / mask.sum(2).unsqueeze(-1)
        diag, factors = self.covariance(support, mask, prototypes)
        return GaussianTask(prototypes, diag, factors)

    @abstractmethod
    def covariance(
        self, support: Float[Tensor, "e n k d"], mask: Bool[Tensor, "e n k"], prototypes: Float[Tensor, "e n d"]
    ) -> Covariance:
        """Diagonal and factors of every class, or of all classes together (size 1)."""


def deviations(
    support: Float[Tensor, "e n k d"], mask: Bool[Tensor, "e n k"], prototypes: Float[Tensor, "e n d"]
) -> Float[Tensor, "e n k d"]:
    """Support embeddings centred on their prototypes; zero where masked out.

    A class with a single example stays uncentred, since centring would leave nothing of it: the paper's one-shot case
    ("we skip the centering about the centroid"), decided class by class when shots are unequal.
    """
    single = mask.sum(2, keepdim=True).unsqueeze(-1) == 1
    centred = torch.where(single, support, support - prototypes.unsqueeze(2))
    return torch.where(mask.unsqueeze(-1), centred, 0)


class SharedDiagonal(nn.Module):
    """The meta-learned positive diagonal of ProtoDDU and ProtoSNGP, and how it is joined with the factors.

    The paper writes both `Lambda + Phi Phi^T` and the shrinkage `delta Lambda + (1 - delta) Phi Phi^T`, and never says
    whether the outer products are divided by their number. The sum is the default, as it is written first and as Eq. 8
    builds it; `shrinkage` and `divide` are the other readings, and each method says which it takes.
    """

    def __init__(self, features: int, *, shrinkage: bool, divide: bool) -> None:
        super().__init__()
        self.divide = divide
        self.raw = nn.Parameter(torch.full((features,), 0.54))  # softplus(0.54) is about 1
        self.mixing = nn.Parameter(torch.zeros(())) if shrinkage else None  # delta = sigmoid(mixing)

    def join(self, factors: Float[Tensor, "e c d r"], count: Float[Tensor, "e c"]) -> Covariance:
        diag = nn.functional.softplus(self.raw)
        if self.divide:
            factors = factors * count.clamp_min(1).rsqrt()[..., None, None]
        if self.mixing is not None:
            delta = self.mixing.sigmoid()
            diag, factors = delta * diag, (1 - delta).sqrt() * factors
        return diag.expand(*factors.shape[:2], -1), factors
