"""What every method of the table promises. A new method is covered by being in the table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fewsure
from fewsure.episodes import Episodes
from fewsure.errors import FewsureError
from fewsure.methods import METHODS, method_class
from fewsure.task import Method, Prediction, Task
from helpers import VARIANT_IDS, VARIANTS, WAY, assert_same, make, parameters, random_episodes

every_method = pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)


def predict(method: Method, episodes: Episodes) -> Prediction:
    with torch.no_grad():
        return method.predict(episodes)


def adapt(method: Method, episodes: Episodes) -> Task:
    with torch.no_grad():
        embedded = episodes.map(method.embed)
        return method.adapt(embedded.support, embedded.mask)


def assert_finite(prediction: Prediction) -> None:
    assert prediction.logits.isfinite().all()
    assert prediction.strangeness.isfinite().all()
    assert prediction.energy is None or prediction.energy.isfinite().all()


@pytest.fixture
def method(variant: tuple[str, int | None]) -> Method:
    return make(variant)


@every_method
@pytest.mark.parametrize("shot", [2, 5])
def test_a_gradient_reaches_every_parameter(method: Method, shot: int) -> None:
    method.train().loss(random_episodes(shot=shot, queries=20)).backward()
    for name, parameter in method.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@every_method
def test_loss_falls_when_trained(method: Method) -> None:
    episodes = random_episodes(episodes=8, queries=20)
    optimiser = torch.optim.Adam(method.parameters(), 1e-3)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = method.loss(episodes)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@every_method
def test_strangers_do_not_count_in_the_loss(method: Method) -> None:
    episodes = random_episodes(queries=8)
    strangers = replace(
        episodes,
        query=torch.cat([episodes.query, 50 * torch.ones(3, 4, 2)], 1),
        labels=torch.cat([episodes.labels, torch.full((3, 4), -1)], 1),
    )
    torch.testing.assert_close(method.loss(strangers), method.loss(episodes))


@every_method
def test_a_batch_of_episodes_equals_a_loop_over_them(method: Method) -> None:
    episodes = random_episodes(episodes=4)
    one_by_one = Prediction.cat([predict(method, part) for part in episodes.chunks(1)])
    assert_same(predict(method, episodes), one_by_one)


@every_method
def test_the_order_of_the_support_means_nothing(method: Method) -> None:
    episodes = random_episodes()
    order = torch.rand(episodes.mask.shape).argsort(2)
    shuffled = replace(episodes, support=episodes.support.take_along_dim(order.unsqueeze(-1), 2))
    assert_same(predict(method, shuffled), predict(method, episodes))


@every_method
def test_permuting_classes_permutes_logits_and_nothing_else(method: Method) -> None:
    if not method.equivariant:
        pytest.skip("this method does not promise it")
    episodes = random_episodes()
    order = torch.tensor([2, 0, 3, 1])
    permuted = replace(episodes, support=episodes.support[:, order], mask=episodes.mask[:, order])
    expected = predict(method, episodes)
    assert_same(predict(method, permuted), replace(expected, logits=expected.logits[..., order]))


@every_method
def test_masked_shots_equal_separate_episodes_with_fewer(method: Method) -> None:
    full = random_episodes(episodes=5, shot=5)
    shots = torch.tensor([5, 4, 3, 2, 1])
    mask = (torch.arange(5) < shots[:, None, None]).expand_as(full.mask)
    hidden = torch.where(mask.unsqueeze(-1), full.support, torch.nan)
    masked = predict(method, replace(full, support=hidden, mask=mask))
    separate = [
        predict(method, replace(full[i : i + 1], support=full.support[i : i + 1, :, :k], mask=mask[i : i + 1, :, :k]))
        for i, k in enumerate(shots.tolist())
    ]
    assert_same(masked, Prediction.cat(separate))


@every_method
def test_it_does_not_matter_where_in_an_unequal_support_the_gaps_are(method: Method) -> None:
    compact = random_episodes(way=3, shot=4)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool).expand_as(compact.mask)
    places = torch.tensor([6, 1, 3, 4])  # of the same examples, in the same order, among seven
    support = torch.full((3, 3, 7, 2), torch.inf)
    spread = torch.zeros(3, 3, 7, dtype=torch.bool)
    support[:, :, places], spread[:, :, places] = compact.support, mask
    expected = predict(method, replace(compact, mask=mask))
    assert_finite(expected)
    assert_same(predict(method, replace(compact, support=support, mask=spread)), expected)


@every_method
def test_a_query_is_answered_without_regard_to_its_neighbours(method: Method) -> None:
    episodes = random_episodes(queries=6)
    among_others = predict(method, episodes)
    alone = [predict(method, replace(episodes, query=q, labels=y)) for q, y in _one_query_at_a_time(episodes)]
    for index, prediction in enumerate(alone):
        assert_same(prediction, among_others.map(lambda t, i=index: t[:, i : i + 1]))


def _one_query_at_a_time(episodes: Episodes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(episodes.query.split(1, 1), episodes.labels.split(1, 1), strict=True))


@every_method
def test_a_saved_method_answers_the_same_when_loaded(method: Method, tmp_path: Path) -> None:
    method.train().loss(random_episodes()).backward()
    with torch.no_grad():  # away from the initial weights, which the seed alone would give again
        for parameter in method.parameters():
            parameter -= 0.01 * parameter.grad.sign()
    method.eval()
    fewsure.save(method, tmp_path / "run")
    loaded = fewsure.load(tmp_path / "run")
    assert loaded.spec == method.spec
    assert not loaded.training
    assert_same(predict(loaded, random_episodes()), predict(method, random_episodes()), rtol=0, atol=0)


@every_method
def test_a_seed_decides_everything(variant: tuple[str, int | None]) -> None:
    episodes = random_episodes()
    first, again, other = (predict(make(variant, seed), episodes) for seed in (1, 1, 2))
    assert_same(again, first, rtol=0, atol=0)
    assert not torch.equal(other.logits, first.logits)


@every_method
def test_predicting_leaves_no_trace_on_the_method(method: Method) -> None:
    before, attributes = parameters(method), set(vars(method))
    first = predict(method, random_episodes(seed=1))
    predict(method, random_episodes(way=2, shot=1, seed=2))
    assert set(vars(method)) == attributes
    for name, tensor in parameters(method).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert_same(predict(method, random_episodes(seed=1)), first, rtol=0, atol=0)


@every_method
@pytest.mark.parametrize(("way", "shot"), [(1, 1), (1, 5), (2, 1), (10, 1), (10, 10)])
def test_any_way_and_shot_get_finite_answers(method: Method, way: int, shot: int) -> None:
    if not method.any_way:
        pytest.skip("this method is bound to one number of classes")
    prediction = predict(method, random_episodes(way=way, shot=shot))
    assert prediction.logits.shape == (3, 6, way)
    assert prediction.strangeness.shape == (3, 6)
    assert_finite(prediction)


@every_method
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e4])
def test_answers_stay_finite_for_inputs_of_any_size(method: Method, scale: float) -> None:
    assert_finite(predict(method, random_episodes().map(lambda x: scale * x)))


@every_method
def test_a_far_query_is_stranger_than_a_near_one(method: Method) -> None:
    episodes = random_episodes()
    far = replace(episodes, query=1e3 * (1 + episodes.query.abs()))
    assert (predict(method, far).strangeness > predict(method, episodes).strangeness).all()


@every_method
def test_a_task_is_its_tensors_and_its_specification(method: Method) -> None:
    episodes = random_episodes()
    task = adapt(method, episodes)
    tensors = safetensors.torch.load(safetensors.torch.save({k: v.contiguous() for k, v in task.tensors().items()}))
    rebuilt = type(task)(**tensors, **json.loads(json.dumps(task.spec())))
    query = method.embed(episodes.query).detach()
    assert_same(rebuilt(query), task(query), rtol=0, atol=0)


@every_method
def test_a_task_outlives_its_method(variant: tuple[str, int | None]) -> None:
    method, episodes = make(variant), random_episodes()
    expected, task, query = predict(method, episodes), adapt(method, episodes), method.embed(episodes.query).detach()
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.zero_()
    assert_same(task(query), expected)


@every_method
def test_a_task_moves_to_a_device_whole(method: Method) -> None:
    task = adapt(method, random_episodes())
    moved = task.to("meta")
    assert type(moved) is type(task)
    assert moved.spec() == task.spec()
    assert {name: (t.device.type, t.shape) for name, t in moved.tensors().items()} == {
        name: ("meta", t.shape) for name, t in task.tensors().items()
    }


@every_method
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_support_example_that_is_no_number_is_named(method: Method, bad: float) -> None:
    episodes = random_episodes()
    episodes.support[1, 2, 3, 0] = bad
    with pytest.raises(FewsureError, match=r"example 3 of class 2 \(episode 1\) holds NaN or infinity: remove it"):
        predict(method, episodes)


@every_method
def test_a_class_without_an_example_is_named(method: Method) -> None:
    episodes = random_episodes()
    episodes.mask[2, 1] = False
    with pytest.raises(FewsureError, match=r"class 1 of episode 2 has no support example: give at least one"):
        predict(method, episodes)


@every_method
@pytest.mark.usefixtures("unchecked")
def test_features_that_do_not_match_are_named(method: Method) -> None:
    episodes = random_episodes()
    with pytest.raises(FewsureError, match=r"shape \(2,\).*shape \(3,\): expected the same features in both"):
        predict(method, replace(episodes, query=torch.zeros(3, 6, 3)))
    with pytest.raises(FewsureError, match=r"3 features .* takes 2: build the method with the shape of your inputs"):
        predict(method, episodes.map(lambda x: x[..., [0, 0, 1]]))


@every_method
@pytest.mark.usefixtures("unchecked")
def test_embeddings_of_the_wrong_size_are_named(method: Method) -> None:
    with pytest.raises(FewsureError, match=r"shape \(7,\): expected vectors of 64 features; embed them with"):
        method.adapt(torch.zeros(1, 2, 3, 7))
    task = adapt(method, random_episodes())
    with pytest.raises(FewsureError, match="queries have 7 features and the support had 64: embed both with"):
        task(torch.zeros(3, 5, 7))


@every_method
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 6), (3, 1, 5), (5, 4, 3)])
def test_a_mask_of_the_wrong_shape_is_named(method: Method, shape: tuple[int, ...]) -> None:
    support = random_episodes().map(method.embed).support
    with pytest.raises(FewsureError, match=r"mask \(.*\): expected support \[episodes, classes, shots, features\]"):
        method.adapt(support, torch.ones(shape, dtype=torch.bool))


@every_method
def test_only_a_method_bound_to_a_number_of_classes_is_told_one(variant: tuple[str, int | None]) -> None:
    name, rank = variant
    if method_class(name).any_way:
        assert fewsure.build(name, rank=rank, way=7).spec == fewsure.build(name, rank=rank).spec
    else:
        assert fewsure.build(name, rank=rank, way=7).spec["way"] == 7
        with pytest.raises(FewsureError, match=f"method '{name}' is bound to one number of classes: give way"):
            fewsure.build(name, rank=rank)


def test_an_unknown_method_is_named_with_the_nearest() -> None:
    with pytest.raises(FewsureError, match=r"unknown method 'protonets': expected one of .*; did you mean 'protonet'?"):
        fewsure.build("protonets")


@pytest.mark.parametrize("name", METHODS)
def test_rank_is_for_methods_that_have_one(name: str) -> None:
    if method_class(name).ranked:
        with pytest.raises(FewsureError, match="rank -2 is negative: give 0"):
            fewsure.build(name, rank=-2, way=WAY)
        assert fewsure.build(name, way=WAY).spec["rank"] == 1
    else:
        with pytest.raises(FewsureError, match=f"method '{name}' has no rank, but was given 2: leave it out"):
            fewsure.build(name, rank=2, way=WAY)
        assert fewsure.build(name, way=WAY).spec["rank"] is None


@pytest.mark.parametrize("name", METHODS)
def test_an_option_that_a_method_does_not_have_is_named(name: str) -> None:
    with pytest.raises(FewsureError, match=f"method '{name}' does not take these options .*'nonsense'"):
        fewsure.build(name, way=WAY, nonsense=1)


@pytest.mark.parametrize(("name", "divide"), [("protoddu", True), ("protosngp", False)])  # not their defaults
@pytest.mark.parametrize("changed", [("shrinkage",), ("divide",), ("shrinkage", "divide")])
def test_other_readings_of_a_shared_covariance_train_save_and_predict(
    name: str, divide: bool, changed: tuple[str, ...], tmp_path: Path
) -> None:
    readings = {"shrinkage": True, "divide": divide}
    method = fewsure.build(name, **{option: readings[option] for option in changed})
    method.loss(random_episodes()).backward()
    for parameter_name, parameter in method.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name
    fewsure.save(method, tmp_path)
    prediction = predict(fewsure.load(tmp_path), random_episodes())
    assert_same(prediction, predict(method.eval(), random_episodes()), rtol=0, atol=0)
    assert not torch.allclose(prediction.logits, predict(make((name, None)), random_episodes()).logits)


def test_ddu_and_sngp_differ_at_one_shot() -> None:
    episodes = random_episodes(shot=1)
    ddu, sngp = (adapt(make((name, None)), episodes) for name in ("protoddu", "protosngp"))
    assert ddu.tensors()["factors"].shape == (3, 4, 64, 1)  # its one embedding, uncentred
    assert sngp.tensors()["factors"].shape == (3, 1, 64, 4)  # all embeddings, centred together
    torch.testing.assert_close(sngp.tensors()["factors"].sum(-1), torch.zeros(3, 1, 64), rtol=0, atol=1e-4)
    torch.testing.assert_close(ddu.tensors()["factors"].squeeze(-1), ddu.tensors()["mean"], rtol=0, atol=0)


def test_protonet_logits_are_minus_the_squared_distance_up_to_a_constant() -> None:
    method, episodes = make(("protonet", None)), random_episodes()
    z = episodes.map(method.embed)
    distance = (z.query.unsqueeze(2) - z.support.mean(2).unsqueeze(1)).square().sum(-1)
    logits = predict(method, episodes).logits
    torch.testing.assert_close(logits - logits[..., :1], distance[..., :1] - distance, rtol=1e-4, atol=1e-3)


def test_only_plain_protonet_is_free_of_the_spectral_bound() -> None:
    free = {name for name in METHODS if not any("parametrizations" in key for key in make((name, None)).state_dict())}
    assert free == {"protonet"}
