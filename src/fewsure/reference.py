"""The paper's formulas as they are written, for readers, tests and benchmarks. Slow on purpose; nothing else uses them.

Appendix and equation numbers are those of "Meta Learning Low Rank Covariance Factors for Energy-Based Deterministic
Uncertainty" (ICLR 2022).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def inverse_and_logdet(
    diag: Float[Tensor, "*b d"], factors: Float[Tensor, "*b d r"]
) -> tuple[Float[Tensor, "*b d d"], Float[Tensor, "*b"]]:
    """Eqs. 8 and 9: Sherman-Morrison and the determinant lemma, one factor after the other on dense matrices."""
    inverse = torch.diag_embed(diag.reciprocal())
    logdet = diag.log().sum(-1)
    for phi in factors.unbind(-1):
        left = (inverse @ phi.unsqueeze(-1)).squeeze(-1)
        growth = 1 + (phi * left).sum(-1)
        inverse = inverse - left.unsqueeze(-1) * left.unsqueeze(-2) / growth[..., None, None]
        logdet = logdet + growth.log()
    return inverse, logdet


def logits_and_energy(
    z: Float[Tensor, "*b q d"],
    mean: Float[Tensor, "*b n d"],
    diag: Float[Tensor, "*b n d"],
    factors: Float[Tensor, "*b n d r"],
) -> tuple[Float[Tensor, "*b q n"], Float[Tensor, "*b q"]]:
    """Eqs. 7 and 10: class logits, and the energy before it is divided by T and bounded below."""
    inverse, logdet = inverse_and_logdet(diag, factors)
    dz = z.unsqueeze(-3) - mean.unsqueeze(-2)  # [*b n q d]
    distance = torch.einsum("...nqi,...nij,...nqj->...qn", dz, inverse, dz)
    return -0.5 * distance - 0.5 * logdet.unsqueeze(-2), -torch.logsumexp(-distance, -1)


def sampled_softmax(
    logits: Float[Tensor, "*b n"], energy: Float[Tensor, "*b"], temperature: float, samples: int, eps: float = 1e-6
) -> Float[Tensor, "*b n"]:
    """Eqs. 10 to 12: mean softmax of logits drawn from N(mean logit, h(E)), h read as the standard deviation."""
    scale = (energy / temperature).clamp_min(eps)[..., None]
    total = torch.zeros_like(logits)
    for _ in range(samples):
        total += (logits + scale * torch.randn_like(logits)).softmax(-1)
    return total / samples
