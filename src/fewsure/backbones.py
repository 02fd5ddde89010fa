"""Embedding networks, by name."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from fewsure.errors import FewsureError, unknown_name
from fewsure.spectral import bound


class Residual(nn.Module):
    """`x + f(x)`: with f bounded by c the block is Lipschitz at most 1 + c (a lower bound it has only for c < 1)."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class FC(nn.Sequential):
    """The residual network of the toy tasks: 2 -> 128, four residual blocks, -> 64.

    The bound holds the residual blocks down. The last layer has no bias: it would cancel in `z - prototype`.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (2,),
        *,
        c: float | None = 3.0,
        width: int = 128,
        blocks: int = 4,
        features: int = 64,
        dropout: float = 0.1,
    ) -> None:
        if len(shape) != 1:
            raise FewsureError(f"backbone 'fc' takes vectors, not inputs of shape {shape}: choose a backbone for these")
        layers: list[nn.Module] = [nn.Linear(shape[0], width)]
        for _ in range(blocks):
            block = nn.Sequential(bound(nn.Linear(width, width), c), nn.ReLU(), nn.Dropout(dropout))
            layers.append(Residual(block))
        super().__init__(*layers, nn.Linear(width, features, bias=False))
        self.features = features

    def forward(self, input: Float[Tensor, "*b d"]) -> Float[Tensor, "*b features"]:
        if input.shape[-1] != self[0].in_features:
            raise FewsureError(
                f"inputs have {input.shape[-1]} features and this backbone takes {self[0].in_features}: "
                "build the method with the shape of your inputs"
            )
        return super().forward(input)


BACKBONES: dict[str, Callable[..., nn.Module]] = {"fc": FC}


def build_backbone(name: str, shape: tuple[int, ...], *, c: float | None) -> nn.Module:
    """A backbone of the table for inputs of a shape, its layers bounded by `c`, or free for `None`."""
    if name not in BACKBONES:
        raise unknown_name("backbone", name, BACKBONES)
    return BACKBONES[name](shape, c=c)
