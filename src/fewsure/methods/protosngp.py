"""ProtoSNGP: one covariance for all classes, as SNGP (Liu et al. 2020) has, made from all support embeddings.

The paper found SNGP's own logit-normal inference far worse and "utilized Mahalanobis distance instead"; so does this.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fewsure.methods.classgaussians import ClassGaussians, Covariance, SharedDiagonal


class ProtoSNGP(ClassGaussians):
    """`Lambda + Phi Phi^T / (N K)` with Phi all N K support embeddings, centred on their overall mean.

    Divided by their number, unlike ProtoDDU's: the undivided sum drowns the diagonal, and with it the directions that
    tell the classes apart, and its accuracy on the toy tasks falls well below the paper's.
    """

    def __init__(self, backbone: nn.Module, *, shrinkage: bool = False, divide: bool = True) -> None:
        super().__init__(backbone)
        self.diagonal = SharedDiagonal(self.features, shrinkage=shrinkage, divide=divide)

    def covariance(
        self, support: Float[Tensor, "e n k d"], mask: Bool[Tensor, "e n k"], prototypes: Float[Tensor, "e n d"]
    ) -> Covariance:
        count = mask.sum((1, 2))
        centre = support.sum((1, 2)) / count.unsqueeze(-1)
        spread = torch.where(mask.unsqueeze(-1), support - centre[:, None, None], 0)
        return self.diagonal.join(spread.flatten(1, 2).mT.unsqueeze(1), count.to(support.dtype).unsqueeze(1))
