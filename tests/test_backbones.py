"""The embedding networks."""

import pytest
import torch
from torch import nn

from fewsure import spectral
from fewsure.backbones import BACKBONES, FC, Residual, build_backbone
from fewsure.errors import FewsureError


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 3, 4)])
def test_fc_embeds_over_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    model, x = FC((5,)).eval(), torch.randn(*leading, 5)
    assert model(x).shape == (*leading, model.features)
    torch.testing.assert_close(model(x).reshape(-1, 64), model(x.reshape(-1, 5)))


def test_fc_is_four_residual_blocks_of_128_to_64_features() -> None:
    model = FC()
    blocks = [module for module in model if isinstance(module, Residual)]
    widths = [tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(blocks) == 4
    assert widths == [(128, 2), *[(128, 128)] * 4, (64, 128)]
    assert model[-1].bias is None  # it would cancel in z - prototype
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.1}


def test_dropout_acts_in_training_only() -> None:
    model, x = FC((2,), dropout=0.5), torch.randn(4, 2)
    assert torch.equal(model.eval()(x), model.eval()(x))
    assert not torch.equal(model.train()(x), model.train()(x))


@pytest.mark.parametrize(("c", "bounds"), [(3.0, 4), (None, 0)])
def test_the_bound_holds_the_residual_blocks(c: float | None, bounds: int) -> None:
    model = build_backbone("fc", (2,), c=c)
    assert len(list(spectral.bounded(model))) == bounds


def test_a_bounded_block_is_lipschitz_at_most_1_plus_c() -> None:
    model = FC((2,), c=3.0, width=16).eval()
    (block, *_) = (module for module in model if isinstance(module, Residual))
    with torch.no_grad():
        for _, weight in spectral.bounded(model):
            weight *= 100
        for _ in range(100):
            spectral.step(model)
    x, y = torch.randn(2, 500, 16).unbind()
    stretch = (block(x) - block(y)).norm(dim=-1) / (x - y).norm(dim=-1)
    assert stretch.max() <= 4.0
    assert stretch.max() > 1.0


@pytest.mark.parametrize("name", BACKBONES)
def test_inputs_of_the_wrong_shape_are_named(name: str) -> None:
    with pytest.raises(FewsureError, match=rf"backbone '{name}' takes vectors, not inputs of shape \(3, 8, 8\)"):
        build_backbone(name, (3, 8, 8), c=3.0)


@pytest.mark.usefixtures("unchecked")
def test_fc_names_inputs_of_the_wrong_size() -> None:
    with pytest.raises(FewsureError, match="inputs have 3 features and this backbone takes 2"):
        FC()(torch.zeros(4, 3))


def test_an_unknown_backbone_is_named() -> None:
    with pytest.raises(FewsureError, match=r"unknown backbone 'fcc': expected one of .*; did you mean 'fc'"):
        build_backbone("fcc", (2,), c=None)
