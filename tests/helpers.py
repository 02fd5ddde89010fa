"""What several test modules build their cases from."""

from dataclasses import replace

import torch
from torch import Tensor

import fewsure
from fewsure.episodes import Episodes
from fewsure.methods import METHODS, method_class
from fewsure.task import Method, Prediction

#: Every method of the table; those that have a rank at three of them.
VARIANTS = [(name, rank) for name in METHODS for rank in ((0, 1, 4) if method_class(name).ranked else (None,))]
VARIANT_IDS = [name if rank is None else f"{name}-{rank}" for name, rank in VARIANTS]


WAY = 4  # of made-up episodes, and of methods that are bound to one


def make(variant: tuple[str, int | None], seed: int = 0) -> Method:
    """A fresh method in evaluation mode, the same for the same seed."""
    torch.manual_seed(seed)
    name, rank = variant
    return fewsure.build(name, rank=rank, way=WAY).eval()


def random_episodes(episodes: int = 3, way: int = WAY, shot: int = 5, queries: int = 6, *, seed: int = 0) -> Episodes:
    """Episodes whose classes are blobs in the plane, every query of a class of its task."""
    draw = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(episodes, way, 2, generator=draw)
    support = centres.unsqueeze(2) + torch.randn(episodes, way, shot, 2, generator=draw)
    labels = torch.randint(way, (episodes, queries), generator=draw)
    query = centres.take_along_dim(labels.unsqueeze(-1), 1) + torch.randn(episodes, queries, 2, generator=draw)
    return Episodes(support, torch.ones(episodes, way, shot, dtype=torch.bool), query, labels)


def with_strangers(episodes: Episodes, count: int = 20, *, seed: int = 0) -> Episodes:
    """The same episodes, each shown some queries of no class, scattered widely."""
    draw = torch.Generator().manual_seed(seed)
    extra = 8 * torch.randn(len(episodes), count, 2, generator=draw)
    labels = torch.full((len(episodes), count), -1)
    return replace(
        episodes, query=torch.cat([episodes.query, extra], 1), labels=torch.cat([episodes.labels, labels], 1)
    )


def calibration(
    sharpness: float = 1.0, *, way: int = 4, known: int = 2000, strangers: int = 1000, seed: int = 0
) -> tuple[Prediction, Tensor]:
    """One long made-up episode: logits of the known queries whose labels are drawn from softmax(logits / sharpness),
    so that a temperature of `sharpness` calibrates them, and strangers that are stranger, but not always."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(1, known + strangers, way, generator=draw)
    labels = torch.multinomial(logits[0, :known].softmax(-1), 1, generator=draw).T
    labels = torch.cat([labels, torch.full((1, strangers), -1)], 1)
    energy = 1 + 2 * torch.rand(1, known + strangers, generator=draw) + 6 * (labels < 0)
    strangeness = 3 + torch.randn(1, known + strangers, generator=draw) + 2 * (labels < 0)
    return Prediction(sharpness * logits, strangeness, energy), labels


def assert_same(actual: Prediction, expected: Prediction, *, rtol: float = 1e-4, atol: float = 1e-3) -> None:
    """Predictions agree up to the rounding of single precision (of squared distances of up to some hundreds)."""
    for name in ("logits", "strangeness", "energy"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def parameters(method: Method) -> dict[str, Tensor]:
    """A copy of everything a method remembers."""
    return {name: tensor.clone() for name, tensor in method.state_dict().items()}
