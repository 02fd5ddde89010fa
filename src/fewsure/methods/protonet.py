"""Prototypical networks (Snell et al. 2017), and Protonet-SN: the same with the spectral bound."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from fewsure.methods.classgaussians import ClassGaussians, Covariance


class ProtonetSN(ClassGaussians):
    """Covariance I / 2 for every class: the logit is minus the squared distance (Eq. 2) up to a shared constant."""

    def covariance(
        self, support: Float[Tensor, "e n k d"], mask: Bool[Tensor, "e n k"], prototypes: Float[Tensor, "e n d"]
    ) -> Covariance:
        shared = prototypes[:, :1]
        return shared.new_full(shared.shape, 0.5), shared.new_zeros(*shared.shape, 0)


class Protonet(ProtonetSN):
    """The same on the same residual network without the bound ("residual connections in all Protonet based models")."""

    bounded = False
