"""The toy tasks keep to the protocol, fact by fact."""

import math

import pytest
import torch
from torch import Tensor

from fewsure.data import source
from fewsure.data.toys import BOX_SCALE, Gaussians, box, grid
from fewsure.episodes import Episodes, generator
from fewsure.errors import FewsureError
from fewsure.paper import toy_table

FAMILIES = ("moons", "circles", "gaussians")
families = pytest.mark.parametrize("name", FAMILIES)


def draw(name: str, episodes: int = 200, strangers: str | None = None, seed: int = 0, **options) -> Episodes:
    return source(name, **options).draw(episodes, generator(seed, "test toys"), strangers)


def by_class(episodes: Episodes) -> Tensor:
    """All points of every class, support first: [e n points 2]."""
    way = episodes.mask.shape[1]
    query = episodes.query[episodes.labels >= 0].unflatten(0, (len(episodes), way, -1))
    return torch.cat([episodes.support, query], 2)


@pytest.mark.parametrize(("name", "way", "shot"), [("moons", 2, 5), ("circles", 2, 5), ("gaussians", 10, 10)])
def test_a_task_has_the_papers_counts(name: str, way: int, shot: int) -> None:
    episodes = draw(name, 7)
    assert episodes.support.shape == (7, way, shot, 2)
    assert episodes.mask.all()
    assert episodes.query.shape == (7, 50 * way, 2)
    for label in range(way):
        assert ((episodes.labels == label).sum(1) == 50).all()


@families
def test_queries_are_labelled_by_the_class_they_belong_to(name: str) -> None:
    """In most tasks the nearest prototype already says which."""
    episodes = draw(name)
    distance = torch.cdist(episodes.query, episodes.support.mean(2))
    accuracy = (distance.argmin(-1) == episodes.labels).float().mean()
    assert accuracy > {"moons": 0.7, "circles": 0.53, "gaussians": 0.75}[name]


@families
@pytest.mark.parametrize(("way", "shot", "queries"), [(1, 1, 3), (2, 7, 20), (2, 20, 3)])
def test_other_ways_shots_and_numbers_of_queries(name: str, way: int, shot: int, queries: int) -> None:
    episodes = draw(name, 4, way=way, shot=shot, queries=queries)
    assert episodes.support.shape == (4, way, shot, 2)
    per_class = max(queries, shot)  # half a class must hold the support
    assert episodes.query.shape == (4, way * per_class, 2)


@families
def test_support_comes_from_one_half_of_its_class_along_an_axis(name: str) -> None:
    points = by_class(draw(name))  # [e n points 2]
    shot = {"gaussians": 10}.get(name, 5)
    count = points.shape[2]
    rank = points.argsort(2).argsort(2)[:, :, :shot]  # of the support in its class, along each axis
    below = (rank < count // 2).all(2)
    above = (rank >= count - count // 2).all(2)
    sides = torch.cat([below, above], -1).flatten(0, 1)  # x low, y low, x high, y high
    assert sides.any(-1).all()
    only = sides[sides.sum(-1) == 1].float().mean(0)
    torch.testing.assert_close(only, torch.full((4,), 0.25), rtol=0, atol=0.08)  # each as often
    # Within the half any point may be chosen: ranks reach from end to end of it.
    low = rank[..., 0][below[..., 0] & ~below[..., 1] & ~above[..., 1]]
    assert low.unique().numel() == count // 2


@families
def test_classes_are_cut_each_on_its_own(name: str) -> None:
    points = by_class(draw(name, 300, way=2))
    shot, count = {"gaussians": 10}.get(name, 5), points.shape[2]
    below = (points.argsort(2).argsort(2)[:, :, :shot] < count // 2).all(2)[..., 0].float()
    assert abs(torch.corrcoef(below.T)[0, 1]) < 0.2


def test_labels_of_moons_are_shuffled() -> None:
    first = by_class(draw("moons", 400))[:, 0].mean(
        1
    )  # of an outer moon the middle is (0, 0.64), of an inner (1, -0.14)
    share = (first[:, 1] > 0.25).float().mean()
    assert 0.4 < share < 0.6


def test_labels_of_circles_are_shuffled() -> None:
    radius = by_class(draw("circles", 400)).norm(dim=-1).mean(2)
    share = (radius[:, 0] > radius[:, 1]).float().mean()
    assert 0.4 < share < 0.6


def distance_to_moon(points: Tensor) -> Tensor:
    """From each point to the nearer of the two noiseless moons."""
    angle = torch.linspace(0, math.pi, 400)
    outer = torch.stack([angle.cos(), angle.sin()], -1)
    moons = torch.cat([outer, torch.tensor([1, 0.5]) - outer])
    return torch.cdist(points.flatten(0, -2), moons).amin(-1).reshape(points.shape[:-1])


def assert_uniform(values: Tensor, low: float, high: float) -> None:
    """Quantiles are those of a uniform law, within what a few hundred noisy estimates allow."""
    quantiles = torch.quantile(values, torch.tensor([0.05, 0.5, 0.95]))
    expected = low + (high - low) * torch.tensor([0.05, 0.5, 0.95])
    torch.testing.assert_close(quantiles, expected, rtol=0, atol=0.07 * (high - low))


def test_noise_of_moons_is_uniform_up_to_a_quarter() -> None:
    points = by_class(draw("moons", 600))
    across = (
        distance_to_moon(points).square().mean((1, 2)).sqrt()
    )  # one of two directions, and curved: an underestimate
    assert across.max() < 0.25 * 1.15
    assert 0.35 < (across < 0.115).float().mean() < 0.6
    assert across.min() < 0.01


def test_noise_and_radii_of_circles_are_uniform() -> None:
    points = by_class(draw("circles", 600, queries=195))
    radius = points.norm(dim=-1)
    outer, inner = radius.mean(2).sort(1, descending=True).values.unbind(1)
    picked = radius.take_along_dim(radius.mean(2).argsort(1, descending=True)[:, :1, None], 1).squeeze(1)
    assert_uniform(picked.std(1), 0, 0.25)  # about a radius of 1, radial noise is one coordinate of the noise
    assert ((outer - 1).abs() < 0.1).all()
    quiet = picked.std(1) < 0.05
    assert_uniform(inner[quiet], 0, 0.8)


def test_only_gaussians_are_normalised_and_by_their_support() -> None:
    flat = draw("gaussians").support.flatten(1, 2)
    torch.testing.assert_close(flat.mean(1), torch.zeros(200, 2), rtol=0, atol=1e-5)
    torch.testing.assert_close(flat.std(1, correction=0), torch.ones(200, 2), rtol=0, atol=1e-4)
    for name in ("moons", "circles"):
        assert draw(name).support.flatten(1, 2).std(1, correction=0).std() > 0.05


def raw_gaussians(episodes: int, count: int) -> Tensor:
    return Gaussians().points(episodes, count, generator(0, "raw"))


def test_means_of_gaussians_are_uniform_on_a_square() -> None:
    means = raw_gaussians(200, 200).mean(2).flatten(0, 1)
    assert means.abs().max() < 5.5
    for axis in range(2):
        assert_uniform(means[:, axis], -5, 5)
    assert abs(torch.corrcoef(means.T)[0, 1]) < 0.1


def test_covariances_of_gaussians_follow_their_law() -> None:
    """Q diag(t d1, t d2 / 5) Q^T with t ~ U(0.1, 1) and d ~ U(0, 1)."""
    points = raw_gaussians(400, 400)
    points = points - points.mean(2, keepdim=True)
    covariance = (points.mT @ points / 399).flatten(0, 1)
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    # E[t (d1 + d2 / 5)] = 0.55 (0.5 + 0.1); E[t^2] = 0.37; var = 0.37 E[(d1 + d2/5)^2] - 0.33^2.
    assert trace.mean().item() == pytest.approx(0.33, abs=0.01)
    assert trace.var().item() == pytest.approx(0.37 * (1.04 / 12 + 0.36) - 0.33**2, rel=0.1)
    # E[det] = E[t^2] E[d1] E[d2] / 5.
    assert torch.linalg.det(covariance).mean().item() == pytest.approx(0.37 / 20, rel=0.08)
    # No direction of the plane is preferred between the axes.
    assert covariance[:, 0, 0].mean().item() == pytest.approx(covariance[:, 1, 1].mean().item(), rel=0.08)
    assert covariance[:, 0, 1].mean().abs() < 0.01


@families
def test_a_seed_draws_the_same_tasks_and_another_seed_others(name: str) -> None:
    first, again, other = draw(name, 3, "box"), draw(name, 3, "box"), draw(name, 3, "box", seed=1)
    for field in ("support", "mask", "query", "labels"):
        assert torch.equal(getattr(again, field), getattr(first, field))
    assert not torch.equal(other.support, first.support)


@families
def test_drawing_moves_no_global_seed(name: str) -> None:
    before = torch.get_rng_state()
    draw(name, 3, "box")
    assert torch.equal(torch.get_rng_state(), before)


@families
def test_tasks_differ(name: str) -> None:
    support = draw(name, 20).support.flatten(1)
    assert (torch.cdist(support, support) + torch.eye(20)).min() > 0.1


@families
@pytest.mark.parametrize(("strangers", "count"), [("grid", 10_000), ("box", None)])
def test_strangers_follow_the_known_queries(name: str, strangers: str, count: int | None) -> None:
    without, with_them = draw(name, 3), draw(name, 3, strangers)
    known = without.query.shape[1]
    assert torch.equal(with_them.query[:, :known], without.query)
    assert torch.equal(with_them.labels[:, :known], without.labels)
    assert (with_them.labels[:, known:] == -1).all()
    assert with_them.query.shape[1] - known == (known if count is None else count)


def test_the_grid_is_100_by_100_on_minus_3_to_3() -> None:
    points = grid()
    assert points.shape == (10_000, 2)
    ticks = torch.linspace(-3, 3, 100)
    assert torch.equal(points.reshape(100, 100, 2)[0, :, 0], ticks)  # rows run along x
    assert torch.equal(points.reshape(100, 100, 2)[:, 0, 1], ticks)  # from the bottom up
    assert len(points.unique(dim=0)) == 10_000


@families
def test_grid_strangers_are_the_grid(name: str) -> None:
    assert torch.equal(draw(name, 2, "grid").query[:, -10_000:], grid().expand(2, -1, -1))


@families
def test_box_strangers_fill_a_box_of_two_and_a_half_times_the_support(name: str) -> None:
    episodes = draw(name, 4)
    points = box(episodes.support, 4000, generator(0, "box"))
    flat = episodes.support.flatten(1, 2)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    unit = (points - (low + high) / 2) / (high - low)  # in units of the support's box, from its middle
    assert BOX_SCALE == 2.5
    assert unit.abs().max() <= 1.25 + 1e-5
    for axis in range(2):
        assert_uniform(unit[..., axis].flatten(), -1.25, 1.25)
    assert abs(torch.corrcoef(unit.flatten(0, 1).T)[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("moons", {"way": 3}, "moons with 3 classes .*: expected 1 to 2 classes, and a shot and queries of 1 or more"),
        ("circles", {"way": 0}, "circles with 0 classes"),
        ("gaussians", {"way": -1}, "gaussians with -1 classes .*: expected 1 or more classes"),
        ("moons", {"shot": 0}, "classes of 0 examples"),
        ("moons", {"queries": 0}, "and 0 queries"),
    ],
)
def test_a_way_or_shot_that_cannot_be_is_named(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(FewsureError, match=message):
        source(name, **options)


def test_an_unknown_dataset_or_kind_of_strangers_is_named() -> None:
    with pytest.raises(FewsureError, match=r"unknown dataset 'moon': expected one of .*; did you mean 'moons'"):
        source("moon")
    with pytest.raises(FewsureError, match=r"unknown split 'valid': expected one of calibrate, select, test, train"):
        source("moons", split="valid")
    with pytest.raises(FewsureError, match="unknown kind of strangers for 'moons' 'noise': expected one of box, grid"):
        draw("moons", 2, "noise")


def test_the_covariance_of_the_papers_text_leaves_the_bayes_classifier_below_its_accuracy() -> None:
    """`Q diag(d1, d2) Q^T` against the one we draw, at the paper's 10 classes: why the fork's is used."""
    draw = generator("bayes")

    def bayes_accuracy(variance: Tensor) -> float:
        mean = 10 * torch.rand(200, 10, 1, 2, generator=draw) - 5
        first = torch.nn.functional.normalize(2 * torch.rand(200, 10, 2, generator=draw) - 1, dim=-1)
        rotation = torch.stack([first, torch.stack([-first[..., 1], first[..., 0]], -1)], -1)
        root = rotation * variance.sqrt().unsqueeze(-2)
        points = (mean + torch.randn(200, 10, 60, 2, generator=draw) @ root.mT).flatten(1, 2)
        along = (points.unsqueeze(1) - mean) @ rotation
        density = -0.5 * (along.square() / variance.unsqueeze(2)).sum(-1) - 0.5 * variance.log().sum(-1, keepdim=True)
        return (density.argmax(1) == torch.arange(10).repeat_interleave(60)).float().mean().item()

    text = torch.rand(200, 10, 2, generator=draw)
    shrunk = text * (0.1 + 0.9 * torch.rand(200, 10, 1, generator=draw)) * torch.tensor([1, 0.2])
    published = [row["id/accuracy"][0] / 100 for row in toy_table()["gaussians"]["rows"]]
    assert bayes_accuracy(text) < min(published) < max(published) < bayes_accuracy(shrunk)
