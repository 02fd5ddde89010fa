"""The fast algebra against dense float64, at every shape and scale that it may meet.

What is compared was given the same single-precision numbers. `EPS` is the unit of rounding in single precision, and the
tolerances say what the rounded terms are: with `x = Lambda^-1/2 dz`, the squared distance is that of a vector computed
to a few units of |x|, so that it may be off by `2 sqrt(d2) eta + eta^2`, `eta` being some EPS |x|.
"""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal

from fewsure import reference
from fewsure.gaussian import Gaussians, GaussianTask

EPS = 2.0**-24


@dataclass(frozen=True)
class Case:
    """Two Gaussians in single precision, some queries about each, and the dense truth about them."""

    d: int
    rank: int
    factors: float = 1.0  # their size
    spread: float = 0.0  # features are scaled by 10 to the power of up to this
    offset: float = 0.0  # of every feature
    along: bool = False  # queries lie along the factors, where the distance is smallest
    apart: bool = False  # the diagonal has a scale of its own: variances from 1e-3 to 1e3 that know nothing of the rest
    seed: int = 0

    @cached_property
    def drawn(self) -> tuple[Gaussians, Tensor]:
        draw = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        scale = 10 ** (self.spread * (2 * torch.rand(self.d, generator=draw) - 1))
        mean = scale * normal(2, self.d) + self.offset
        uniform = torch.rand(2, self.d, generator=draw)
        diag = 10 ** (6 * uniform - 3) if self.apart else scale.square() * (0.1 + 0.9 * uniform)
        factors = self.factors * normal(2, self.d, self.rank)
        factors = factors if self.apart else scale.unsqueeze(-1) * factors
        away = normal(2, 5, self.rank) @ factors.mT if self.along and self.rank else scale * normal(2, 5, self.d)
        return Gaussians(mean, diag, factors), mean.unsqueeze(1) + away

    @property
    def gaussians(self) -> Gaussians:
        return self.drawn[0]

    @property
    def z(self) -> Tensor:
        return self.drawn[1]

    @property
    def covariance(self) -> Tensor:
        factors = self.gaussians.factors.double()
        return torch.diag_embed(self.gaussians.diag.double()) + factors @ factors.mT

    @property
    def dz(self) -> Tensor:
        return self.z.double() - self.gaussians.mean.double().unsqueeze(1)

    @property
    def root(self) -> Tensor:
        """Cholesky factor of the covariance in units of the diagonal, in which it is well scaled."""
        unit = self.gaussians.diag.double().rsqrt()
        return torch.linalg.cholesky(unit.unsqueeze(-1) * self.covariance * unit.unsqueeze(-2))

    @property
    def x(self) -> Tensor:
        return self.dz * self.gaussians.diag.double().rsqrt().unsqueeze(1)

    @property
    def distance_and_logdet(self) -> tuple[Tensor, Tensor]:
        """By an orthogonal factorisation of [B; I], B = Lambda^-1/2 Phi, which no scale can upset."""
        diag, factors = self.gaussians.diag.double(), self.gaussians.factors.double()
        identity = torch.eye(self.rank, dtype=torch.float64).expand(2, -1, -1)
        q, r = torch.linalg.qr(torch.cat([factors * diag.rsqrt().unsqueeze(-1), identity], 1))
        upper, lower = q[:, : self.d], q[:, self.d :]
        y = self.x @ upper
        distance = (self.x - y @ upper.mT).square().sum(-1) + (y @ lower.mT).square().sum(-1)
        return distance, diag.log().sum(-1) + 2 * r.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)


ANY = {
    "d": st.integers(1, 256),
    "rank": st.integers(0, 128),
    "factors": st.sampled_from([1e-3, 0.1, 1.0, 30.0, 1e3]),
    "spread": st.sampled_from([0.0, 1.0, 3.0]),
    "offset": st.sampled_from([0.0, -100.0, 1e3]),
    "along": st.booleans(),
    "seed": st.integers(0, 100),
}
CASES = st.builds(Case, **ANY)  # dense float64 is exact enough for these
ILL_SCALED = st.builds(Case, **ANY, apart=st.just(True))  # and not for these


def corners(test):
    for case in (
        Case(1, 0),
        Case(1, 1, factors=1e3),
        Case(1, 128, factors=1e3, offset=1e3),
        Case(256, 0, spread=3, offset=1e3),
        Case(256, 1, factors=1e3, spread=3, along=True),
        Case(256, 128, factors=1e3, spread=3, offset=1e3),
        Case(64, 64, factors=1e3, along=True),
        Case(64, 65, factors=1e3, along=True),
        Case(16, 128, factors=1e3, spread=3),
    ):
        test = example(case)(test)
    return given(CASES)(test)


def assert_within(actual: Tensor, expected: Tensor, tolerance: Tensor | float) -> None:
    assert actual.isfinite().all()
    excess = ((actual.double() - expected).abs() / tolerance).max().item()
    assert excess <= 1, f"off by {excess:.3g} times the tolerance"


def assert_squared_distance(case: Case, expected: Tensor) -> None:
    actual = case.gaussians.squared_distance(case.z.flatten(0, 1)).unflatten(-1, (2, 5)).diagonal(0, 0, 1).mT
    eta = 4 * EPS * case.x.norm(dim=-1) + 1e-30
    assert_within(actual, expected, 2 * expected.sqrt() * eta + eta.square())
    assert (actual >= 0).all()


def assert_logdet(case: Case, expected: Tensor) -> None:
    terms = case.gaussians.diag.double().log().abs().sum(-1) + expected.abs() + 1
    assert_within(case.gaussians.logdet, expected, 8 * EPS * terms)


@corners
def test_squared_distance(case: Case) -> None:
    white = torch.linalg.solve_triangular(case.root, case.x.mT, upper=False)
    assert_squared_distance(case, white.square().sum(-2))


@corners
def test_logdet(case: Case) -> None:
    of_root = case.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    assert_logdet(case, 2 * of_root + case.gaussians.diag.double().log().sum(-1))


@given(ILL_SCALED)
def test_squared_distance_and_logdet_stand_any_scale(case: Case) -> None:
    distance, logdet = case.distance_and_logdet
    assert_squared_distance(case, distance)
    assert_logdet(case, logdet)


def outer_root(matrix: Tensor) -> Tensor:
    """sqrt(m_ii m_jj): the size of the terms of entry i, j of a positive definite matrix."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    return diagonal.unsqueeze(-1) * diagonal.unsqueeze(-2)


@corners
def test_precision(case: Case) -> None:
    unit = case.gaussians.diag.double().rsqrt()
    expected = torch.cholesky_inverse(case.root) * unit.unsqueeze(-1) * unit.unsqueeze(-2)
    actual = case.gaussians.precision()
    assert_within(actual, expected, 100 * EPS * outer_root(expected))
    torch.testing.assert_close(actual, actual.mT, rtol=1e-6, atol=0)


@corners
def test_covariance(case: Case) -> None:
    assert_within(
        case.gaussians.covariance(), case.covariance, (8 + case.rank**0.5) * EPS * outer_root(case.covariance)
    )


@corners
def test_eigenvalues(case: Case) -> None:
    actual, expected = case.gaussians.eigenvalues(), torch.linalg.eigvalsh(case.covariance)
    # Float64 rounding is relative to the largest.
    assert_within(actual, expected, 4 * EPS * expected.abs() + 1e-12 * expected[..., -1:])
    assert (actual.diff(dim=-1) >= 0).all()


@corners
def test_the_papers_recursion_agrees(case: Case) -> None:
    diag, factors = case.gaussians.diag.double(), case.gaussians.factors.double()
    inverse, logdet = reference.inverse_and_logdet(diag, factors)
    unit = diag.rsqrt()
    dense = torch.cholesky_inverse(case.root) * unit.unsqueeze(-1) * unit.unsqueeze(-2)
    # In whitened space both lose what the condition number takes, of terms of size 1.
    condition = 1 + torch.linalg.matrix_norm(unit.unsqueeze(-1) * factors, 2).square()[..., None, None]
    assert_within(inverse, dense, 1e-14 * condition * unit.unsqueeze(-1) * unit.unsqueeze(-2))
    terms = diag.log().abs().sum(-1) + logdet.abs() + 1
    assert_within(case.gaussians.logdet, logdet, 8 * EPS * terms)


@corners
def test_logits_and_energy_agree_with_the_papers_equations(case: Case) -> None:
    """Both classes are asked about all queries; differences of logits are compared."""
    z, g = case.z.flatten(0, 1), case.gaussians
    prediction = GaussianTask(g.mean[None], g.diag[None], g.factors[None])(z[None])
    doubled = (t.double() for t in (z, g.mean, g.diag, g.factors))
    logits, energy = reference.logits_and_energy(*doubled)
    x = (z.double().unsqueeze(0) - g.mean.double().unsqueeze(1)) * g.diag.double().rsqrt().unsqueeze(1)
    eta = 8 * EPS * x.norm(dim=-1).mT
    distance = (-2 * logits - g.logdet.double()).clamp_min(0)
    # The recursion subtracts in float64, which costs it digits of |x|^2.
    error = 2 * distance.sqrt() * eta + eta.square() + 1e-9 * x.square().sum(-1).mT
    error = error + 8 * EPS * (distance + g.diag.double().log().abs().sum(-1) + g.logdet.double().abs() + 1)
    assert_within(prediction.logits[0], logits, error)
    assert_within(prediction.energy[0], energy, error.amax(-1))


@pytest.mark.parametrize("rank", [0, 1, 3, 12])
def test_logits_differ_as_log_densities_of_torch_do(rank: int) -> None:
    mean, diag, factors = torch.randn(4, 8), 0.1 + torch.rand(4, 8), 2 * torch.randn(4, 8, rank)
    z = 2 * torch.randn(20, 8)
    prediction = GaussianTask(mean[None], diag[None], factors[None])(z[None])
    m, v, f, q = (t.double() for t in (mean, diag, factors, z.unsqueeze(1)))
    densities = [MultivariateNormal(m, torch.diag_embed(v) + f @ f.mT).log_prob(q)]
    if 0 < rank < 8:
        densities.append(LowRankMultivariateNormal(m, f, v).log_prob(q))
    for density in densities:
        constant = 4 * torch.log(torch.tensor(2 * torch.pi))  # d/2 log 2 pi, which all classes share
        torch.testing.assert_close(prediction.logits[0].double(), density + constant, rtol=1e-5, atol=1e-4)


def test_a_large_common_offset_costs_no_digits() -> None:
    exact = torch.randint(-8, 8, (3, 10, 6)) / 4  # and so is this plus 1024, in single precision
    mean, z = exact[:, :4], exact[:, 4:]
    diag, factors = 0.1 + torch.rand(3, 4, 6), torch.randn(3, 4, 6, 2)
    here, there = (GaussianTask(mean + o, diag, factors)(z + o) for o in (0.0, 1024.0))
    assert torch.equal(there.logits, here.logits)
    assert torch.equal(there.energy, here.energy)


@pytest.mark.parametrize("rank", [0, 2, 20])
def test_one_covariance_for_all_classes_equals_the_same_for_each(rank: int) -> None:
    mean, diag, factors = torch.randn(3, 4, 8), 0.1 + torch.rand(3, 1, 8), torch.randn(3, 1, 8, rank)
    z = torch.randn(3, 7, 8)
    shared = GaussianTask(mean, diag, factors)
    expanded = GaussianTask(mean, diag.expand(-1, 4, -1), factors.expand(-1, 4, -1, -1))
    torch.testing.assert_close(shared(z).logits, expanded(z).logits)
    torch.testing.assert_close(shared(z).energy, expanded(z).energy)
    assert shared.classes.logdet.shape == (3, 1)
    assert shared.classes.precision().shape == shared.classes.covariance().shape == (3, 1, 8, 8)


@pytest.mark.parametrize(("d", "rank"), [(3, 0), (3, 1), (4, 3), (3, 3), (2, 5)])
def test_gradients_are_those_of_finite_differences(d: int, rank: int) -> None:
    mean, z = torch.randn(1, 2, d).double(), torch.randn(1, 3, d).double()
    raw, factors = torch.randn(1, 2, d).double(), torch.randn(1, 2, d, rank).double()

    def everything(mean: Tensor, raw: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        task = GaussianTask(mean, 0.1 + raw.exp(), factors)
        prediction = task(z)
        return prediction.logits, prediction.strangeness, prediction.energy, task.classes.precision()

    inputs = [t.requires_grad_() for t in (mean, raw, factors, z)]
    assert torch.autograd.gradcheck(everything, inputs)


def test_gradients_stay_finite_for_large_and_for_absent_factors() -> None:
    factors = torch.cat([1e3 * torch.randn(1, 2, 16, 3), torch.zeros(1, 2, 16, 2)], -1)  # as masked-out shots leave
    inputs = [t.requires_grad_() for t in (torch.randn(1, 2, 16), 0.1 + torch.rand(1, 2, 16), factors)]
    GaussianTask(*inputs)(torch.randn(1, 5, 16)).logits.square().sum().backward()
    for tensor in inputs:
        assert tensor.grad.isfinite().all()


def test_double_precision_in_is_double_precision_out() -> None:
    case = Case(32, 4, factors=100.0)
    g = case.gaussians
    double = Gaussians(g.mean.double(), g.diag.double(), g.factors.double())
    white = torch.linalg.solve_triangular(case.root, case.x.mT, upper=False)
    actual = double.squared_distance(case.z.double().flatten(0, 1)).unflatten(-1, (2, 5)).diagonal(0, 0, 1).mT
    assert actual.dtype == double.logdet.dtype == torch.float64
    torch.testing.assert_close(actual, white.square().sum(-2), rtol=1e-10, atol=0)


def test_strangeness_without_a_background_is_the_papers_score_turned_round() -> None:
    prediction = GaussianTask(torch.randn(2, 5, 3), torch.ones(2, 5, 3), torch.zeros(2, 5, 3, 0))(torch.randn(2, 9, 3))
    expected = torch.log(torch.tensor(5.0)) - prediction.logits.logsumexp(-1)
    torch.testing.assert_close(prediction.strangeness, expected)


def test_a_background_makes_strangeness_a_ratio_of_densities() -> None:
    mean, diag, factors = torch.randn(2, 4, 6), 0.1 + torch.rand(2, 4, 6), torch.randn(2, 4, 6, 2)
    background_mean, background_diag = torch.randn(2, 6), 4 + torch.rand(2, 6)
    z = torch.randn(2, 9, 6)
    task = GaussianTask(mean, diag, factors, background_mean, background_diag)
    m, v, f, bm, bv, q = (t.double() for t in (mean, diag, factors, background_mean, background_diag, z))
    of_class = LowRankMultivariateNormal(m.unsqueeze(1), f.unsqueeze(1), v.unsqueeze(1)).log_prob(q.unsqueeze(2))
    of_background = MultivariateNormal(bm.unsqueeze(1), torch.diag_embed(bv).unsqueeze(1)).log_prob(q)
    expected = of_background - of_class.exp().mean(-1).log()
    torch.testing.assert_close(task(z).strangeness.double(), expected, rtol=1e-5, atol=1e-4)
    flat = GaussianTask(mean, diag, factors)
    torch.testing.assert_close(task(z).logits, flat(z).logits)  # the background does not take part in the choice
    torch.testing.assert_close(task(z).energy, flat(z).energy)
    assert set(task.tensors()) - set(flat.tensors()) == {"background_mean", "background_diag"}
