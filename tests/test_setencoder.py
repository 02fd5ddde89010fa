"""The set encoder: what its output is, what it does not depend on, and that it reads the set it is given."""

import pytest
import torch
from torch import Tensor

from fewsure.setencoder import MIN_DIAG, SetEncoder

FEATURES = 6


def encoder(rank: int = 2, seed: int = 0, **options) -> SetEncoder:
    torch.manual_seed(seed)
    return SetEncoder(FEATURES, rank, width=16, heads=2, **options)


def full(items: Tensor) -> Tensor:
    return torch.ones(items.shape[:2], dtype=torch.bool)


@pytest.mark.parametrize("rank", [0, 1, 5, 20])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_diagonal_is_bounded_and_factors_have_the_rank(rank: int, scale: float) -> None:
    items = scale * torch.randn(7, 4, FEATURES)
    diag, factors = encoder(rank)(items, full(items))
    assert diag.shape == (7, FEATURES)
    assert factors.shape == (7, FEATURES, rank)
    assert (diag >= MIN_DIAG).all()
    assert (diag <= 1).all()


def test_the_diagonal_reaches_its_lower_bound_and_no_further() -> None:
    model, items = encoder(), torch.randn(7, 4, FEATURES)
    with torch.no_grad():
        model.heads_bias[0] -= 50
    diag, _ = model(items, full(items))
    assert torch.equal(diag, torch.full_like(diag, MIN_DIAG))


def test_the_order_of_a_set_means_nothing() -> None:
    model, items = encoder(), torch.randn(7, 5, FEATURES)
    for actual, expected in zip(
        model(items[:, torch.randperm(5)], full(items)), model(items, full(items)), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_masked_elements_are_not_seen() -> None:
    model, items = encoder(), torch.randn(7, 5, FEATURES)
    mask = full(items)
    mask[:, 3:] = False
    expected = model(items[:, :3], mask[:, :3])
    items[:, 3:] = 100
    for actual, wanted in zip(model(items, mask), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_sets_do_not_see_each_other() -> None:
    model, items = encoder(), torch.randn(7, 5, FEATURES)
    for actual, expected in zip(model(items[2:3], full(items[2:3])), model(items, full(items)), strict=True):
        torch.testing.assert_close(actual, expected[2:3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shot", [1, 2])
def test_seeds_take_part_from_two_shots_on(shot: int) -> None:
    model, items = encoder(), torch.randn(7, shot, FEATURES)
    before = model(items, full(items))
    with torch.no_grad():
        model.seeds.normal_()
    for actual, expected in zip(model(items, full(items)), before, strict=True):
        assert torch.allclose(actual, expected, atol=1e-6) == (shot == 1)


def test_at_one_shot_the_factors_still_differ() -> None:
    items = torch.randn(7, 1, FEATURES)
    diag, factors = encoder(rank=3)(items, full(items))
    outputs = [diag, *factors.unbind(-1)]
    for i, first in enumerate(outputs):
        for second in outputs[:i]:
            assert (first - second).abs().max() > 1e-2


def test_a_gradient_reaches_every_seed_and_head() -> None:
    model, items = encoder(rank=3), torch.randn(7, 2, FEATURES)
    diag, factors = model(items, full(items))
    (diag.square().sum() + factors.square().sum()).backward()
    for parameter in (model.seeds, model.heads, model.heads_bias):
        assert (parameter.grad.flatten(1).abs().amax(1) > 0).all()


def test_seeds_start_as_standard_normal_draws() -> None:
    seeds = SetEncoder(4, 63, width=64).seeds
    assert abs(seeds.mean().item()) < 0.05
    assert abs(seeds.std().item() - 1) < 0.05


@pytest.mark.parametrize("rank", [1, 64])
def test_the_covariance_starts_near_its_diagonal(rank: int) -> None:
    torch.manual_seed(0)
    items = torch.randn(7, 5, 64)
    diag, factors = SetEncoder(64, rank)(items, full(items))
    assert 0 < factors.square().sum(-1).mean() < diag.mean()


def between_class_variance(model: SetEncoder, items: Tensor) -> float:
    """How much the covariances of different sets differ, relative to their size."""
    with torch.no_grad():
        diag, factors = model(items, full(items))
    covariance = torch.diag_embed(diag) + factors @ factors.mT
    return ((covariance - covariance.mean(0)).square().mean() / covariance.square().mean()).item()


def test_different_sets_get_different_covariances() -> None:
    items = torch.randn(50, 5, FEATURES)
    same = items[:1].expand(50, -1, -1)
    assert between_class_variance(encoder(), items) > 1e-5
    assert between_class_variance(encoder(), same) < 1e-12


def pooled_variance(model: SetEncoder, items: Tensor) -> float:
    """How much the vectors pooled from different sets differ, relative to their size."""
    pooled = []
    with model.pool.register_forward_hook(lambda module, inputs, output: pooled.append(output)), torch.no_grad():
        model(items, full(items))
    return ((pooled[0] - pooled[0].mean(0)).square().mean() / pooled[0].square().mean()).item()


@pytest.mark.parametrize("seed", range(5))
def test_a_residual_query_connection_drowns_what_the_set_says(seed: int) -> None:
    """It adds the seed to what is pooled, the same for every set."""
    items = torch.randn(50, 5, FEATURES)
    without, residual = (encoder(seed=seed, residual_query=r) for r in (False, True))
    assert pooled_variance(without, items) > 1.5 * pooled_variance(residual, items)


def test_it_learns_the_spread_of_a_set() -> None:
    """Trained to predict held-out points of a set from the others, it reads the set's spread, feature by feature."""
    torch.manual_seed(0)
    model = SetEncoder(2, 0, width=16, heads=2)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        variance = 0.15 + 0.75 * torch.rand(count, 2)
        points = torch.randn(count, 20, 2) * variance.sqrt().unsqueeze(1)
        return variance, points[:, :10], points[:, 10:]

    for _ in range(300):
        _, seen, held = draw(64)
        diag, _ = model(seen, full(seen))
        loss = (diag.log().unsqueeze(1) + held.square() / diag.unsqueeze(1)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    variance, seen, _ = draw(500)
    with torch.no_grad():
        diag, _ = model(seen, full(seen))
    for feature in range(2):
        own = torch.corrcoef(torch.stack([diag[:, feature], variance[:, feature]]))[0, 1]
        other = torch.corrcoef(torch.stack([diag[:, feature], variance[:, 1 - feature]]))[0, 1]
        assert own > 0.6
        assert abs(other) < 0.3
