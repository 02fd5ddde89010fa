"""Predictions, tasks and episodes: the small types that everything passes around."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import fewsure
from fewsure.episodes import derive_seed, generator
from fewsure.task import Prediction, Task
from helpers import assert_same, random_episodes


def prediction(episodes: int = 2, *, energy: bool = True) -> Prediction:
    logits = torch.randn(episodes, 5, 3)
    return Prediction.of(logits, energy=torch.randn(episodes, 5) if energy else None)


def test_strangeness_is_minus_the_log_of_the_mean_over_classes() -> None:
    p = prediction()
    torch.testing.assert_close(p.strangeness, -p.logits.exp().mean(-1).log())
    doubled = Prediction.of(torch.cat([p.logits, p.logits], -1))  # twice the same classes: no stranger
    torch.testing.assert_close(doubled.strangeness, p.strangeness)


def test_a_background_adds_its_log_density() -> None:
    logits, background = torch.randn(2, 5, 3), torch.randn(2, 5)
    with_background = Prediction.of(logits, background=background)
    torch.testing.assert_close(with_background.strangeness, Prediction.of(logits).strangeness + background)


@pytest.mark.parametrize("energy", [True, False])
def test_parts_of_a_prediction_join_to_the_whole(energy: bool) -> None:
    whole = prediction(4, energy=energy)
    parts = [whole.map(lambda t, rows=rows: t[rows]) for rows in ([0], [1, 2], [3])]
    assert_same(Prediction.cat(parts), whole, rtol=0, atol=0)
    assert whole.way == 3


def test_an_energy_that_some_parts_lack_is_dropped() -> None:
    assert Prediction.cat([prediction(), prediction(energy=False)]).energy is None


def test_a_task_tells_its_tensors_from_its_specification() -> None:
    @dataclass(frozen=True, eq=False)
    class Nearest(Task):
        means: Tensor
        scale: float
        extra: Tensor | None = None

        def __call__(self, query: Tensor) -> Prediction:
            return Prediction.of(-self.scale * torch.cdist(query, self.means))

    task = Nearest(torch.randn(1, 3, 2), 2.0)
    assert task.tensors().keys() == {"means"}
    assert task.spec() == {"scale": 2.0, "extra": None}
    assert task.to("meta").means.device.type == "meta"
    assert task.means.device.type == "cpu"
    with pytest.raises(AttributeError):
        task.scale = 3.0


def test_episodes_come_apart_and_keep_their_parts_together() -> None:
    episodes = random_episodes(episodes=5)
    chunks = list(episodes.chunks(2))
    assert [len(chunk) for chunk in chunks] == [2, 2, 1]
    for name in ("support", "mask", "query", "labels"):
        assert torch.equal(torch.cat([getattr(chunk, name) for chunk in chunks]), getattr(episodes, name))
    picked = episodes[torch.tensor([3, 3, 0])]
    assert torch.equal(picked.support[1], episodes.support[3])
    assert torch.equal(picked.labels[2], episodes.labels[0])


def test_mapping_episodes_maps_inputs_only() -> None:
    episodes = random_episodes()
    doubled = episodes.map(lambda x: 2 * x)
    assert torch.equal(doubled.support, 2 * episodes.support)
    assert torch.equal(doubled.query, 2 * episodes.query)
    assert doubled.labels is episodes.labels
    assert episodes.to("meta").labels.device.type == "meta"


def test_seeds_are_the_same_on_every_machine_and_each_for_one_purpose() -> None:
    assert derive_seed(3, "moons", "test") == 36136355140748889
    seeds = {derive_seed(seed, name, use) for seed in range(5) for name in "ab" for use in ("test", "train")}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**56 for seed in seeds)
    assert torch.equal(torch.rand(3, generator=generator(1, "x")), torch.rand(3, generator=generator(1, "x")))
    assert not torch.equal(torch.rand(3, generator=generator(1, "x")), torch.rand(3, generator=generator(1, "y")))


def test_everything_public_can_be_had_from_the_package() -> None:
    for name in fewsure.__all__:
        assert getattr(fewsure, name) is not None
    assert set(dir(fewsure)) == set(fewsure.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        fewsure.nonsense  # noqa: B018


def test_the_loss_is_the_cross_entropy_of_the_query_logits() -> None:
    method, episodes = fewsure.build("protonet").eval(), random_episodes(queries=9)
    probabilities = method.predict(episodes).logits.softmax(-1)
    picked = probabilities.gather(-1, episodes.labels.unsqueeze(-1))
    assert method.loss(episodes).item() == pytest.approx(-picked.log().mean().item(), rel=1e-4)
    uniform = replace(episodes, support=torch.zeros_like(episodes.support))
    assert method.loss(uniform).item() == pytest.approx(math.log(4), rel=1e-4)
