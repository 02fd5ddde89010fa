"""The toy families of the paper's appendix, meta-moons, meta-circles and meta-Gaussians, drawn in batches.

Every class of a task is cut in half at the median of a random axis, and its support comes from a random half: no task
shows a whole class, so the shape of the classes must be meta-learned. The rest of the points are the queries.

Where the text and an early public fork by the paper's first author differ, the figures decide. The text normalises
every task by its support, the fork Gaussians only; unnormalised moons and circles are near the paper's accuracy and
AUROC, normalised ones far below. The fork's Gaussian covariances, `Q diag(t d1, t d2 / 5) Q^T`, are used too: with the
text's `Q D Q^T` even the Bayes classifier stays below the paper's accuracy.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fewsure.episodes import Episodes, Source
from fewsure.errors import FewsureError

GRID_SIDE, GRID_EXTENT = 100, 3.0  # the test strangers: a grid on [-3, 3]^2 in the method's input coordinates
BOX_SCALE = 2.5  # the calibration strangers: uniform on the support's bounding box, enlarged


class Toy(Source):
    """A family of two-dimensional tasks; a subclass draws the points of its classes."""

    shape = (2,)
    strangers: ClassVar[tuple[str, ...]] = ("box", "grid")
    calibration_strangers, test_strangers = "box", "grid"
    normalise: ClassVar[bool] = False
    max_way: ClassVar[int | None] = 2

    def __init__(
        self, *, split: str = "test", way: int | None = None, shot: int | None = None, queries: int = 50
    ) -> None:
        self.split = split  # the same tasks for all: only the seeds that draw them differ
        self.way = self.way if way is None else way
        self.shot = self.shot if shot is None else shot
        self.queries = queries
        if min(self.way, self.shot, queries) < 1 or (self.max_way is not None and self.way > self.max_way):
            limit = "1 or more" if self.max_way is None else f"1 to {self.max_way}"
            raise FewsureError(
                f"{self.name} with {self.way} classes of {self.shot} examples and {queries} queries: "
                f"expected {limit} classes, and a shot and queries of 1 or more"
            )

    @abstractmethod
    def points(self, episodes: int, count: int, generator: torch.Generator) -> Float[Tensor, "e n count 2"]:
        """Draw `count` points of every class of the family."""

    def draw(self, episodes: int, generator: torch.Generator, strangers: str | None = None) -> Episodes:
        self.check_strangers(strangers)
        device = generator.device
        # At least twice the shot, so that half a class holds the support.
        points = self.points(episodes, max(self.shot + self.queries, 2 * self.shot), generator)
        # Classes in random order: their indices mean nothing.
        order = torch.rand(points.shape[:2], generator=generator, device=device).argsort(1)
        points = _take(points, order[:, : self.way], 1)
        e, n, count, _ = points.shape
        # Sort each class along its axis and direction; the first half is then the random half.
        axis = torch.randint(2, (e, n, 1, 1), generator=generator, device=device)
        sign = 1 - 2 * torch.randint(2, (e, n, 1), generator=generator, device=device)
        along = points.gather(3, axis.expand(-1, -1, count, 1)).squeeze(3) * sign
        points = _take(points, along.argsort(2), 2)
        half = torch.rand(e, n, count // 2, generator=generator, device=device).argsort(2)
        rest = torch.arange(count // 2, count, device=device).expand(e, n, -1)
        points = _take(points, torch.cat([half, rest], 2), 2)
        support, query = points[:, :, : self.shot], points[:, :, self.shot :].flatten(1, 2)
        if self.normalise:
            flat = support.flatten(1, 2)
            mean = flat.mean(1, keepdim=True)
            scale = flat.std(1, keepdim=True, correction=0).clamp_min(1e-6)
            support, query = (support - mean.unsqueeze(1)) / scale.unsqueeze(1), (query - mean) / scale
        labels = torch.arange(n, device=device).repeat_interleave(count - self.shot).expand(e, -1)
        if strangers is not None:
            extra = grid(device).expand(e, -1, -1) if strangers == "grid" else box(support, query.shape[1], generator)
            query = torch.cat([query, extra], 1)
            labels = torch.cat([labels, labels.new_full(extra.shape[:2], -1)], 1)
        mask = torch.ones(support.shape[:3], dtype=torch.bool, device=device)
        return Episodes(support, mask, query, labels)


class Moons(Toy):
    """Two half-moons; noise deviation U(0, 0.25] a task."""

    name, way, shot = "moons", 2, 5

    def points(self, episodes: int, count: int, generator: torch.Generator) -> Float[Tensor, "e n count 2"]:
        angle = torch.linspace(0, math.pi, count, device=generator.device)
        outer = torch.stack([angle.cos(), angle.sin()], -1)
        inner = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], -1)
        moons = torch.stack([outer, inner]).expand(episodes, -1, -1, -1)
        return _noisy(moons, generator)


class Circles(Toy):
    """Two concentric circles; noise deviation U(0, 0.25] and ratio of the radii U(0, 0.8] a task."""

    name, way, shot = "circles", 2, 5

    def points(self, episodes: int, count: int, generator: torch.Generator) -> Float[Tensor, "e n count 2"]:
        angle = torch.arange(count, device=generator.device) * (2 * math.pi / count)
        circle = torch.stack([angle.cos(), angle.sin()], -1)
        ratio = 0.8 * _unit((episodes,), generator)
        radius = torch.stack([torch.ones_like(ratio), ratio], 1)
        return _noisy(radius[:, :, None, None] * circle, generator)


class Gaussians(Toy):
    """Ten random Gaussians: means U(-5, 5)^2, covariance Q diag(t d1, t d2 / 5) Q^T, t ~ U(0.1, 1), d ~ U(0, 1).

    Q is the orthonormal factor of a 2 x 2 matrix of U(-1, 1): its first column normalised, and the perpendicular.
    """

    name, way, shot = "gaussians", 10, 10
    normalise, max_way = True, None

    def points(self, episodes: int, count: int, generator: torch.Generator) -> Float[Tensor, "e n count 2"]:
        def uniform(*shape: int) -> Tensor:
            return torch.rand(episodes, self.way, *shape, generator=generator, device=generator.device)

        mean = 10 * uniform(1, 2) - 5
        first = torch.nn.functional.normalize(2 * uniform(2) - 1, dim=-1)
        second = torch.stack([-first[..., 1], first[..., 0]], -1)
        long, wide = ((0.1 + 0.9 * uniform(1)) * uniform(2)).unbind(-1)
        variance = torch.stack([long, wide * 0.2], -1)
        root = torch.stack([first, second], -1) * variance.sqrt().unsqueeze(-2)
        noise = torch.randn(episodes, self.way, count, 2, generator=generator, device=generator.device)
        return mean + noise @ root.mT


def grid(device: torch.device | str = "cpu") -> Float[Tensor, "points 2"]:
    """The 100 x 100 grid on [-3, 3]^2, row by row from the bottom."""
    ticks = torch.linspace(-GRID_EXTENT, GRID_EXTENT, GRID_SIDE, device=device)
    return torch.cartesian_prod(ticks, ticks).flip(-1)


def box(support: Float[Tensor, "e n k 2"], count: int, generator: torch.Generator) -> Float[Tensor, "e count 2"]:
    """Points uniform on a box 2.5 times the support's bounding box."""
    flat = support.flatten(1, 2)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    uniform = torch.rand(len(flat), count, 2, generator=generator, device=generator.device)
    return (low + high) / 2 + (uniform - 0.5) * BOX_SCALE * (high - low)


def _unit(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """U(0, 1], open at zero."""
    return 1 - torch.rand(shape, generator=generator, device=generator.device)


def _noisy(points: Float[Tensor, "e n count 2"], generator: torch.Generator) -> Float[Tensor, "e n count 2"]:
    deviation = 0.25 * _unit((len(points), 1, 1, 1), generator)
    return points + deviation * torch.randn(points.shape, generator=generator, device=generator.device)


def _take(points: Float[Tensor, "e n count 2"], index: Tensor, dim: int) -> Tensor:
    """Reorder dimension `dim` by an index over the leading dimensions up to it."""
    index = index.reshape(*index.shape, *[1] * (points.ndim - index.ndim))
    return points.take_along_dim(index, dim)
