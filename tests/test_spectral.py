"""The soft spectral bound on linear and convolutional layers."""

import pytest
import torch
from torch import Tensor, nn

from fewsure import spectral
from fewsure.spectral import SoftBound, bound


def sigma(weight: Tensor) -> float:
    """The spectral norm of the flattened kernel."""
    return torch.linalg.matrix_norm(weight.detach().flatten(1), 2).item()


def layer(kind: str) -> nn.Linear | nn.Conv2d:
    return nn.Linear(12, 20) if kind == "linear" else nn.Conv2d(3, 8, 3)


kinds = pytest.mark.parametrize("kind", ["linear", "conv"])


@kinds
def test_a_norm_above_the_bound_comes_down_to_it(kind: str) -> None:
    module = layer(kind)
    before = sigma(module.weight)
    raw = module.weight.detach().clone()
    bound(module, before / 4)
    for _ in range(200):
        spectral.step(module)
    assert sigma(module.weight) == pytest.approx(before / 4, rel=1e-4)
    torch.testing.assert_close(module.weight, raw / 4, rtol=1e-4, atol=1e-6)


@kinds
def test_a_norm_below_the_bound_is_left_alone(kind: str) -> None:
    module = layer(kind)
    raw = module.weight.detach().clone()
    bound(module, 1.01 * sigma(raw))
    spectral.step(module)
    assert torch.equal(module.weight, raw)


@kinds
def test_the_bound_only_ever_shrinks(kind: str) -> None:
    """A running estimate is never above the norm, so that no weight comes out larger than it is, or below the bound."""
    module = layer(kind)
    for scale in (0.1, 1.0, 10.0, 100.0):
        weight = scale * torch.randn_like(module.weight)
        part = SoftBound(weight, 3.0)
        assert part.norm(weight).item() <= sigma(weight) * (1 + 1e-5)
        shrunk = part(weight)
        assert (shrunk.abs() <= weight.abs()).all()
        assert sigma(shrunk) >= min(3.0, sigma(weight)) * (1 - 1e-5)


@kinds
def test_power_steps_converge_to_the_norm(kind: str) -> None:
    weight = torch.randn_like(layer(kind).weight)
    part = SoftBound(weight, 3.0)
    for _ in range(300):
        part.power_step(weight)
    assert part.norm(weight).item() == pytest.approx(sigma(weight), rel=1e-5)


def test_one_step_an_optimiser_step_keeps_up_with_training() -> None:
    module = bound(nn.Linear(16, 16), 0.5)
    optimiser = torch.optim.Adam(module.parameters(), 1e-3)
    x, largest = torch.randn(64, 16), 0.0
    for _ in range(300):  # the loss asks for large weights
        optimiser.zero_grad()
        (-module(x).square().mean()).backward()
        optimiser.step()
        spectral.step(module)
        largest = max(largest, sigma(module.weight))
    assert largest < 1.2 * 0.5
    assert sigma(module.parametrizations.weight.original) > 1.5 * 0.5


@kinds
@pytest.mark.parametrize("training", [True, False])
def test_forward_changes_no_state(kind: str, training: bool) -> None:
    module = bound(layer(kind), 0.1).train(training)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(2, 12) if kind == "linear" else torch.randn(2, 3, 5, 5)
    first = module(x)
    assert torch.equal(module(x), first)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@kinds
def test_a_gradient_flows_through_the_bound(kind: str) -> None:
    module = bound(layer(kind), 0.1)
    module.weight.square().sum().backward()
    (raw,) = [parameter for name, parameter in module.named_parameters() if "original" in name]
    assert raw.grad.isfinite().all()
    # Growing in size alone changes nothing above the bound.
    assert (raw.grad * raw).sum().abs() < 1e-4 * raw.grad.norm() * raw.norm()


def test_folding_gives_plain_layers_with_the_same_answers() -> None:
    model = nn.Sequential(bound(nn.Conv2d(3, 4, 3), 0.2), nn.Flatten(), bound(nn.Linear(36, 5), 0.2), nn.Linear(5, 2))
    x = torch.randn(6, 3, 5, 5)
    expected = model(x)
    assert len(list(spectral.bounded(model))) == 2
    spectral.fold(model)
    assert list(spectral.bounded(model)) == []
    assert [type(module) for module in model] == [nn.Conv2d, nn.Flatten, nn.Linear, nn.Linear]
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, 2))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(x), expected)
    torch.testing.assert_close(model(x), expected)


def test_no_bound_leaves_the_layer_as_it_is() -> None:
    module = nn.Linear(3, 3)
    assert bound(module, None) is module
    assert list(spectral.bounded(module)) == []


def test_a_bounded_model_survives_its_state() -> None:
    model, other = bound(nn.Linear(8, 8), 0.3), bound(nn.Linear(8, 8), 0.3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.weight, model.weight)
    assert sigma(model.weight) == pytest.approx(0.3, rel=0.05)
