"""ProtoMahalanobis, the paper's method: a set encoder predicts every class's diagonal plus low-rank covariance."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from fewsure.errors import FewsureError
from fewsure.methods.classgaussians import ClassGaussians, Covariance, deviations
from fewsure.setencoder import SetEncoder


class ProtoMahalanobis(ClassGaussians):
    """`Sigma_c = Lambda_c + Phi_c Phi_c^T` from the class's centred support embeddings (Eqs. 4 and 5).

    Rank 0 is the paper's "Diag". Keyword options go to the set encoder.
    """

    ranked = True

    def __init__(self, backbone: nn.Module, *, rank: int = 1, **options: Any) -> None:
        super().__init__(backbone)
        if rank < 0:
            raise FewsureError(f"rank {rank} is negative: give 0 (a diagonal covariance) or more")
        self.encoder = SetEncoder(self.features, rank, **options)

    def covariance(
        self, support: Float[Tensor, "e n k d"], mask: Bool[Tensor, "e n k"], prototypes: Float[Tensor, "e n d"]
    ) -> Covariance:
        items = deviations(support, mask, prototypes)
        diag, factors = self.encoder(items.flatten(0, 1), mask.flatten(0, 1))
        return diag.unflatten(0, mask.shape[:2]), factors.unflatten(0, mask.shape[:2])
