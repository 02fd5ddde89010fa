"""The set encoder g_phi (Eq. 4 of the paper): a class's embeddings to the diagonal and factors of its covariance.

A Set Transformer (Lee et al. 2019): self-attention blocks, then pooling by attention from one learned seed for the
diagonal and one for each factor. Two things differ from the original, both from the paper: the seeds start as draws
from N(0, 1), and the pooling has no residual connection from its query ("crucially": with it the pooling may ignore
the set and give every class the same covariance).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

MIN_DIAG = 0.1  # Appendix, "Positive Diagonal Constraint": Lambda = max(0.1, sigmoid(z))
FACTOR_SCALE = 0.1  # of the factor heads' initial weights: Sigma starts near its diagonal at any rank


class Attention(nn.Module):
    """The multi-head attention block of the Set Transformer, over sets with masked-out elements."""

    def __init__(self, width: int, heads: int, *, residual: bool) -> None:
        super().__init__()
        self.heads, self.residual = heads, residual
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # softmax does not see a key's bias
        self.value = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)

    def forward(
        self, query: Float[Tensor, "b s w"], items: Float[Tensor, "b k w"], mask: Bool[Tensor, "b k"]
    ) -> Float[Tensor, "b s w"]:
        q = self.query(query)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, self.key(items), self.value(items))]
        attended = nn.functional.scaled_dot_product_attention(*split, attn_mask=mask[:, None, None])
        attended = attended.transpose(1, 2).flatten(2)
        out = q + attended if self.residual else attended
        return out + self.mix(out).relu()


class SetEncoder(nn.Module):
    """`(z - prototype) [b k d]` -> `diag [b d]`, `factors [b d r]`.

    With one element, attention ignores its query, so all seeds pool the same vector: the diagonal and every factor
    have a head of their own, and in one-shot tasks the seeds take no part.
    """

    def __init__(
        self,
        features: int,
        rank: int,
        *,
        width: int = 64,
        heads: int = 4,
        blocks: int = 2,
        residual_query: bool = False,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.inlet = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Attention(width, heads, residual=True) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.seeds = nn.Parameter(torch.randn(1 + rank, width))
        self.pool = Attention(width, heads, residual=residual_query)
        heads_weight = torch.empty(1 + rank, width, features).uniform_(-(width**-0.5), width**-0.5)
        heads_weight[1:] *= FACTOR_SCALE
        self.heads = nn.Parameter(heads_weight)
        self.heads_bias = nn.Parameter(torch.zeros(1 + rank, features))

    def forward(
        self, items: Float[Tensor, "b k d"], mask: Bool[Tensor, "b k"]
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d r"]]:
        h = self.inlet(items)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            h = norm(block(h, h, mask))
        pooled = self.pool(self.seeds.expand(len(h), -1, -1), h, mask)
        out = torch.einsum("bsw,swd->bsd", pooled, self.heads) + self.heads_bias
        return out[:, 0].sigmoid().clamp_min(MIN_DIAG), out[:, 1:].mT
