"""ProtoDDU: the class covariances of DDU (Mukhoti et al. 2021), made from each class's own support embeddings."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn

from fewsure.methods.classgaussians import ClassGaussians, Covariance, SharedDiagonal, deviations


class ProtoDDU(ClassGaussians):
    """`Lambda + Phi_c Phi_c^T` with Phi_c the class's centred support embeddings (uncentred for a single example)."""

    def __init__(self, backbone: nn.Module, *, shrinkage: bool = False, divide: bool = False) -> None:
        super().__init__(backbone)
        self.diagonal = SharedDiagonal(self.features, shrinkage=shrinkage, divide=divide)

    def covariance(
        self, support: Float[Tensor, "e n k d"], mask: Bool[Tensor, "e n k"], prototypes: Float[Tensor, "e n d"]
    ) -> Covariance:
        return self.diagonal.join(deviations(support, mask, prototypes).mT, mask.sum(2).to(support.dtype))
