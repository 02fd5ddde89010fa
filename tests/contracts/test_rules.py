"""What every rule of the table promises, and what each of them promises besides."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from fewsure import reference
from fewsure.calibrate import FittedRule
from fewsure.errors import FewsureError
from fewsure.metrics import expected_calibration_error
from fewsure.rules import RULES, LogitNormal, OpenSet, Rule, Softmax, build_rule, fold_unknown, logitnormal
from fewsure.task import Prediction
from helpers import VARIANT_IDS, VARIANTS, calibration, make, random_episodes, with_strangers

#: Rules at settings that calibration might give them, besides the fitted rule of each kind.
SETTINGS = [
    Softmax(),
    Softmax(0.01),
    Softmax(50.0),
    LogitNormal(),
    LogitNormal(20.0),
    LogitNormal(0.1, scale="var"),
    LogitNormal(nodes=64, sampler="monte-carlo"),
    OpenSet(beta=1.0, a=1.0, b=0.0),
    OpenSet(beta=20.0, a=50.0, b=-3.0, pi=0.999),
    OpenSet(beta=1e-3, a=1e-13, b=1e6, pi=1e-6),
]


def _synthetic() -> dict[str, Prediction]:
    signs = torch.randint(2, (2, 9, 5), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    spread = torch.linspace(-1, 1, 18).reshape(2, 9)
    return {
        "extreme": Prediction.of(1e4 * signs, energy=2e4 * spread),
        "one-extreme": Prediction.of(torch.eye(5)[None] * 1e4 - 5e3, energy=torch.full((1, 5), -1e4)),
        "one-class": Prediction.of(-10 * spread.abs().unsqueeze(-1), energy=20 * spread.abs()),
        "tied": Prediction.of(torch.zeros(2, 9, 5), energy=spread),
        "twenty-classes": Prediction.of(torch.randn(2, 9, 20), energy=10 * spread),
        "double": Prediction.of(torch.randn(2, 9, 5).double(), energy=spread.double()),
    }


SYNTHETIC = _synthetic()
every_prediction = pytest.mark.parametrize("prediction", SYNTHETIC.values(), ids=SYNTHETIC)
every_setting = pytest.mark.parametrize("rule", SETTINGS, ids=repr)
every_rule = pytest.mark.parametrize("name", RULES)


def assert_sums_to_one(log_probs: Tensor, prediction: Prediction) -> None:
    assert log_probs.shape == (*prediction.logits.shape[:2], prediction.way + 1)
    assert not log_probs.isnan().any()
    total = log_probs.double().logsumexp(-1)
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-5)


def has_unknown(rule: Rule) -> bool:
    return rule.needs_strangers


def predictions_of(variant: tuple[str, int | None], way: int = 4) -> tuple[Prediction, Tensor]:
    episodes = with_strangers(random_episodes(way=way, queries=20))
    with torch.no_grad():
        return make(variant).predict(episodes), episodes.labels


@every_rule
@pytest.mark.parametrize("way", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_IDS)
def test_fitted_on_any_method_probabilities_sum_to_one(name: str, variant: tuple[str, int | None], way: int) -> None:
    prediction, labels = predictions_of(variant, way)
    rule = RULES[name].fit(prediction, labels)
    assert_sums_to_one(rule(prediction), prediction)
    assert all(math.isfinite(value) for value in rule.params().values() if not isinstance(value, str))


@every_rule
@every_prediction
def test_fitted_rules_stand_predictions_of_any_kind(name: str, prediction: Prediction) -> None:
    assert_sums_to_one(RULES[name].fit(*calibration())(prediction), prediction)


@every_setting
@every_prediction
def test_probabilities_sum_to_one_at_any_setting(rule: Rule, prediction: Prediction) -> None:
    assert_sums_to_one(rule(prediction), prediction)


@every_setting
def test_unknown_is_impossible_unless_the_rule_has_it(rule: Rule) -> None:
    unknown = rule(calibration()[0])[..., -1]
    assert unknown.isfinite().all() if has_unknown(rule) else (unknown == -torch.inf).all()


@every_rule
def test_a_rule_that_needs_an_energy_refuses_by_name_without(name: str) -> None:
    prediction, labels = calibration()
    without = replace(prediction, energy=None)
    if not RULES[name].needs_energy:
        assert_sums_to_one(RULES[name].fit(without, labels)(without), without)
        return
    rule = RULES[name].fit(prediction, labels)
    for refused in (lambda: rule(without), lambda: RULES[name].fit(without, labels)):
        with pytest.raises(FewsureError, match=f"rule '{name}' needs an energy and this prediction has none.*use "):
            refused()


@every_setting
def test_permuting_classes_permutes_probabilities(rule: Rule) -> None:
    prediction = SYNTHETIC["twenty-classes"]
    order = torch.randperm(20)
    permuted = rule(replace(prediction, logits=prediction.logits[..., order]))
    expected = rule(prediction)[..., [*order.tolist(), 20]]
    exactly = isinstance(rule, LogitNormal) and rule.sampler == "sobol"  # where sampling could tell classes apart
    torch.testing.assert_close(permuted, expected, rtol=0 if exactly else 1e-5, atol=0 if exactly else 1e-5)


@every_setting
def test_a_query_is_answered_without_regard_to_its_neighbours(rule: Rule) -> None:
    if isinstance(rule, LogitNormal) and rule.sampler == "monte-carlo":
        pytest.skip("draws anew for every query")
    prediction, _ = calibration()
    torch.testing.assert_close(rule(prediction.map(lambda t: t[:, 7:9])), rule(prediction)[:, 7:9])


@every_setting
def test_the_same_prediction_gets_the_same_answer(rule: Rule) -> None:
    prediction, _ = calibration(known=50, strangers=50)
    assert torch.equal(rule(prediction), rule(prediction))


@every_setting
def test_the_likeliest_class_is_that_of_the_logits(rule: Rule) -> None:
    prediction, _ = calibration(known=200, strangers=0)
    top = prediction.logits.topk(2).values
    clear = (top[..., 0] - top[..., 1]) > 1  # sampling may turn a close call round
    probabilities = rule(prediction.map(lambda t: t[:, clear[0]]))[..., :-1]
    assert (probabilities.argmax(-1) == prediction.logits.argmax(-1)[:, clear[0]]).float().mean() > 0.98


@every_setting
def test_a_fitted_rule_survives_json(rule: Rule) -> None:
    fitted = FittedRule(rule, "here", True, "box", 4, 5, {"reached_cap": False})
    again = FittedRule.from_json(json.loads(json.dumps(fitted.to_json())))
    assert again == fitted
    prediction, _ = calibration()
    assert torch.equal(again.rule(prediction), rule(prediction))


@every_rule
def test_a_rule_needs_known_queries_to_be_fitted(name: str) -> None:
    prediction, labels = calibration()
    with pytest.raises(FewsureError, match="no known query to fit a rule on: calibration episodes need queries"):
        RULES[name].fit(prediction, torch.full_like(labels, -1))


@every_rule
def test_only_a_rule_with_an_unknown_needs_strangers(name: str) -> None:
    prediction, labels = calibration(strangers=0)
    if RULES[name].needs_strangers:
        with pytest.raises(FewsureError, match="needs strangers to be fitted on: draw calibration episodes with some"):
            RULES[name].fit(prediction, labels)
    else:
        assert_sums_to_one(RULES[name].fit(prediction, labels)(prediction), prediction)


@every_rule
def test_strangers_do_not_move_what_known_queries_fit(name: str) -> None:
    prediction, labels = calibration()
    fitted = RULES[name].fit(prediction, labels).params()
    known = prediction.map(lambda t: t[labels >= 0].unsqueeze(0))
    if RULES[name].needs_strangers:
        assert fitted["beta"] == pytest.approx(1 / Softmax.fit(known, labels[labels >= 0][None]).temperature, rel=1e-4)
    else:
        assert RULES[name].fit(known, labels[labels >= 0][None]).params() == fitted


def test_folding_spreads_the_unknown_evenly() -> None:
    rule, prediction = OpenSet(1.0, 1.0, 3.0, 0.3), calibration()[0]
    folded, parts = fold_unknown(rule(prediction)).exp(), rule(prediction).exp()
    torch.testing.assert_close(folded, parts[..., :-1] + parts[..., -1:] / 4)
    torch.testing.assert_close(fold_unknown(Softmax()(prediction)), prediction.logits.log_softmax(-1))


@pytest.mark.parametrize(
    ("make_rule", "message"),
    [
        (lambda: Softmax(0.0), "temperature 0.0: expected a number above 0"),
        (lambda: Softmax(math.nan), "temperature nan: expected a number above 0"),
        (lambda: LogitNormal(-1.0), "temperature -1.0: expected a number above 0"),
        (lambda: LogitNormal(scale="deviation"), "scale 'deviation', .*expected 'std' or 'var'"),
        (lambda: LogitNormal(sampler="halton"), "sampler 'halton': expected .*'sobol' or 'monte-carlo'"),
        (lambda: LogitNormal(nodes=0), "0 nodes: expected 1 or more"),
        (lambda: OpenSet(1.0, 1.0, 0.0, pi=0.0), "pi = 0.0: expected a number between 0 and 1"),
        (lambda: OpenSet(1.0, 1.0, 0.0, pi=1.0), "pi = 1.0: expected a number between 0 and 1"),
        (lambda: OpenSet(0.0, 1.0, 0.0), "beta = 0.0, a = 1.0: expected both above 0"),
        (lambda: OpenSet(1.0, -1.0, 0.0), "beta = 1.0, a = -1.0: expected both above 0"),
        (lambda: OpenSet(1.0, 1.0, 0.0).at_prior(2.0), "pi = 2.0: expected a number between 0 and 1"),
        (lambda: build_rule("softmaxx"), "unknown rule 'softmaxx': expected one of .*did you mean 'softmax'"),
        (lambda: build_rule("softmax", beta=1.0), "rule 'softmax' does not take these parameters .*'beta'"),
        (lambda: build_rule("open-set"), "rule 'open-set' does not take these parameters .*'beta'"),
        (lambda: Softmax.fit(*calibration(), how="guess"), "unknown way to fit 'softmax' 'guess'"),
        (lambda: LogitNormal.fit(*calibration(), how="guess"), "unknown way to fit 'logit-normal' 'guess'"),
        (lambda: LogitNormal.fit(*calibration(), how="ece"), "needs target_ece, the ID ECE to come near"),
        (lambda: LogitNormal.fit(*calibration(strangers=0), how="strangers"), "how='strangers' needs strangers"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_bad_parameter_is_named(make_rule, message: str) -> None:
    with pytest.raises(FewsureError, match=message):
        make_rule()


# softmax


def known_nll(logits: Tensor, labels: Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits.double()[labels >= 0], labels[labels >= 0]).item()


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 6.0])
def test_temperature_is_the_optimum(sharpness: float) -> None:
    prediction, labels = calibration(sharpness)
    best = minimize_scalar(
        lambda t: known_nll(prediction.logits / math.exp(t), labels), bounds=(-4, 4), options={"xatol": 1e-9}
    )
    assert Softmax.fit(prediction, labels).temperature == pytest.approx(math.exp(best.x), rel=1e-4)
    assert OpenSet.fit(prediction, labels).beta == pytest.approx(math.exp(-best.x), rel=1e-4)
    assert math.exp(best.x) == pytest.approx(sharpness, rel=0.1)


@pytest.mark.parametrize("sharpness", [0.2, 6.0])
def test_the_papers_fifty_steps_hardly_leave_their_start(sharpness: float) -> None:
    prediction, labels = calibration(sharpness)
    paper, converged = (Softmax.fit(prediction, labels, how=how).temperature for how in ("paper", "converged"))
    assert abs(paper - 1.5) < 0.15
    assert abs(converged - 1.5) > 1.0
    assert (paper - 1.5) * (converged - 1.5) > 0  # but in the right direction


# logit-normal


@pytest.mark.parametrize("way", [2, 5, 10])
def test_sobol_nodes_come_near_the_papers_sampling(way: int) -> None:
    draw = torch.Generator().manual_seed(way)
    logits, energy = 4 * torch.randn(60, way, generator=draw), 8 * torch.rand(60, generator=draw)
    repeats = 1000
    sampled = reference.sampled_softmax(logits.expand(repeats, -1, -1), energy.expand(repeats, -1), 2.0, 100).mean(0)
    fixed = LogitNormal(2.0)(Prediction.of(logits[None], energy=energy[None]))[0, :, :-1].exp()
    assert (fixed - sampled).abs().max() < 0.015  # of 100,000 draws, whose own error is about 0.003
    assert (fixed - sampled).abs().mean() < 0.002
    rough = LogitNormal(2.0, sampler="monte-carlo", nodes=1000)(Prediction.of(logits[None], energy=energy[None]))
    assert (rough[0, :, :-1].exp() - sampled).abs().max() < 0.08
    assert (rough[0, :, :-1].exp() - sampled).abs().mean() < 0.01


def test_scale_is_read_as_a_deviation_or_as_a_variance() -> None:
    energy = torch.tensor([[-3.0, 0.0, 2.0, 18.0]])
    expected = torch.tensor([[1e-6, 1e-6, 1.0, 9.0]])
    torch.testing.assert_close(LogitNormal(2.0).deviation(energy), expected)
    torch.testing.assert_close(LogitNormal(2.0, scale="var").deviation(energy), expected.sqrt())
    prediction = Prediction.of(torch.randn(1, 4, 3), energy=energy)
    as_deviation = replace(prediction, energy=(energy / 2).clamp_min(0).sqrt())
    torch.testing.assert_close(
        LogitNormal(2.0, scale="var")(prediction), LogitNormal()(as_deviation), rtol=0, atol=3e-3
    )


def test_without_energy_to_speak_of_it_is_softmax() -> None:
    prediction = Prediction.of(torch.randn(1, 9, 4), energy=torch.full((1, 9), -5.0))
    torch.testing.assert_close(LogitNormal()(prediction), Softmax()(prediction), rtol=1e-4, atol=1e-4)


def test_confidence_falls_with_energy_and_rises_with_temperature() -> None:
    logits = torch.tensor([4.0, 0.0, -1.0]).expand(1, 5, 3)
    prediction = Prediction.of(logits, energy=torch.tensor([[0.0, 1.0, 4.0, 16.0, 64.0]]))
    confidence = LogitNormal()(prediction)[0, :, 0]
    assert (confidence.diff() < 0).all()
    assert (LogitNormal(10.0)(prediction)[0, 1:, 0] > confidence[1:]).all()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction, _ = calibration(known=100, strangers=100)
    whole = LogitNormal()(prediction)
    monkeypatch.setattr(logitnormal, "CHUNK", 5000)
    torch.testing.assert_close(LogitNormal()(prediction), whole)


@pytest.mark.parametrize("scale", ["std", "var"])
@pytest.mark.parametrize(("sharpness", "expected"), [(4.0, (1, 1)), (1.3, (2, 12)), (1.0, (13, 20))])
def test_the_papers_search_stops_at_the_first_temperature_that_costs_nothing(
    sharpness: float, expected: tuple[int, int], scale: str
) -> None:
    prediction, labels = calibration(sharpness)
    fitted = LogitNormal.fit(prediction, labels, how="search", cap=20, scale=scale)
    deterministic = known_nll(prediction.logits, labels)
    costs = {t: LogitNormal(float(t), scale=scale).id_nll(prediction, labels) for t in range(1, 21)}
    free = [t for t, cost in costs.items() if cost <= deterministic]
    assert fitted.temperature == (free[0] if free else 20)
    if scale == "std":
        assert expected[0] <= fitted.temperature <= expected[1]


def test_the_search_honours_its_cap() -> None:
    prediction, labels = calibration(0.5)  # underconfident: any sampling makes it worse
    assert LogitNormal.fit(prediction, labels, how="search", cap=3).temperature == 3.0
    assert LogitNormal.fit(prediction, labels, how="search").temperature == 20.0


def ece_of(rule: Rule, prediction: Prediction, labels: Tensor) -> float:
    known = labels >= 0
    confidence, guess = rule(prediction)[..., :-1].exp().max(-1)
    return expected_calibration_error(confidence[known].numpy(), (guess == labels)[known].numpy())


@pytest.mark.parametrize("target", [3.0, 6.0])
def test_fitting_to_an_ece_comes_near_it(target: float) -> None:
    prediction, labels = calibration()
    fitted = LogitNormal.fit(prediction, labels, how="ece", target_ece=target)
    assert fitted.id_ece(prediction, labels) == pytest.approx(ece_of(fitted, prediction, labels))
    assert ece_of(fitted, prediction, labels) == pytest.approx(target, abs=0.5)


def test_fitting_on_strangers_finds_the_best_compromise() -> None:
    prediction, labels = calibration()
    known = labels >= 0

    def cost(temperature: float) -> float:
        log_probs = LogitNormal(temperature)(prediction)[..., :-1]
        of_labels = -log_probs[known].gather(-1, labels[known].unsqueeze(-1)).mean()
        return 0.5 * (of_labels - log_probs[~known].mean()).item()

    fitted = LogitNormal.fit(prediction, labels, how="strangers").temperature
    everywhere = np.logspace(-2, 3, 60)
    assert cost(fitted) <= min(cost(t) for t in everywhere) + 1e-3
    assert everywhere[0] < fitted < everywhere[-1]


@pytest.mark.parametrize("options", [{"how": "search"}, {"how": "ece", "target_ece": 6.0}, {"how": "strangers"}])
def test_a_fit_on_some_of_the_queries_comes_near_the_fit_on_all(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction, labels = calibration(1.3)
    whole = LogitNormal.fit(prediction, labels, **options).temperature
    monkeypatch.setattr(logitnormal, "FIT_QUERIES", 700)
    asked = []
    monkeypatch.setattr(
        LogitNormal, "__call__", lambda rule, p: asked.append(p.logits.shape[1]) or Rule.__call__(rule, p)
    )
    thinned = LogitNormal.fit(prediction, labels, **options).temperature
    assert thinned == pytest.approx(whole, rel=0.5)
    assert max(asked) <= 700


# open-set


def test_another_prior_obeys_bayes_rule() -> None:
    prediction, labels = calibration()
    before = OpenSet.fit(prediction, labels, pi=0.05)
    after = before.at_prior(0.4)
    assert after == replace(before, pi=0.4)
    log_before, log_after = before(prediction).double(), after(prediction).double()
    factor = torch.full((5,), math.log(0.6 / 0.95), dtype=torch.float64)
    factor[-1] = math.log(0.4 / 0.05)
    posterior = (log_before + factor).log_softmax(-1)  # times the ratio of the priors, and normalised
    torch.testing.assert_close(log_after, posterior, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [Softmax(), LogitNormal()], ids=repr)
def test_a_prior_changes_nothing_for_a_rule_without_an_unknown(rule: Rule) -> None:
    assert rule.at_prior(0.4) == rule


def test_the_chance_of_the_unknown_rises_with_strangeness_and_prior() -> None:
    prediction = Prediction(torch.randn(1, 50, 3), torch.linspace(-5, 5, 50)[None])
    rule = OpenSet(1.0, 2.0, 0.5, pi=0.1)
    unknown = rule(prediction)[0, :, -1]
    assert (unknown.diff() > 0).all()
    assert (rule.at_prior(0.2)(prediction)[0, :, -1] > unknown).all()
    at_the_boundary = Prediction(torch.zeros(1, 1, 3), torch.full((1, 1), 0.5))
    assert rule(at_the_boundary)[0, 0, -1].exp().item() == pytest.approx(0.1)  # as strange as not: the prior


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e4, -3e5), (1e-4, 7.0)])
def test_the_unknown_is_a_logistic_regression(scale: float, shift: float) -> None:
    prediction, labels = calibration()
    strangeness = scale * prediction.strangeness.double() + shift
    fitted = OpenSet.fit(replace(prediction, strangeness=strangeness), labels)
    s, unknown = prediction.strangeness[0].double().numpy(), (labels[0] < 0).numpy()
    # Platt's targets as weights: every query counts once as unknown and once as known; each kind weighs 1 in all.
    share = np.where(unknown, (unknown.sum() + 1) / (unknown.sum() + 2), 1 / ((~unknown).sum() + 2))
    weight = 1 / np.where(unknown, unknown.sum(), (~unknown).sum())
    regression = LogisticRegression(C=1e12, tol=1e-10, max_iter=1000).fit(
        np.tile(s, 2)[:, None],
        np.repeat([1, 0], len(s)),
        1e4 * np.concatenate([weight * share, weight * (1 - share)]),
    )
    slope, intercept = regression.coef_.item(), regression.intercept_.item()
    assert fitted.a * scale == pytest.approx(slope, rel=1e-3)
    assert (fitted.b - shift) / scale == pytest.approx(-intercept / slope, rel=1e-3)


def test_reversed_strangeness_still_gives_a_positive_slope() -> None:
    prediction, labels = calibration()
    fitted = OpenSet.fit(replace(prediction, strangeness=-prediction.strangeness), labels, pi=0.3)
    assert 0 < fitted.a < 1e-3
    unknown = fitted(prediction)[..., -1].exp()  # strangeness says nothing: the prior remains
    torch.testing.assert_close(unknown, torch.full_like(unknown, 0.3), rtol=0, atol=0.02)


@pytest.mark.parametrize("gap", [10.0, 1e6])
def test_separable_strangers_do_not_send_the_fit_to_infinity(gap: float) -> None:
    prediction, labels = calibration(known=100, strangers=50)
    separated = replace(prediction, strangeness=prediction.strangeness + gap * (labels < 0))
    fitted = OpenSet.fit(separated, labels)
    assert 0 < fitted.a < 1e3
    assert abs(fitted.b) < 2 * gap
    unknown = fitted.at_prior(0.5)(separated)[..., -1].exp()
    assert (unknown[labels < 0] > 0.9).all()
    assert (unknown[labels >= 0] < 0.1).all()


def test_constant_strangeness_leaves_the_prior() -> None:
    prediction, labels = calibration(known=60, strangers=60)
    flat = replace(prediction, strangeness=torch.full_like(prediction.strangeness, 3.0))
    unknown = OpenSet.fit(flat, labels, pi=0.2)(flat)[..., -1].exp()
    torch.testing.assert_close(unknown, torch.full_like(unknown, 0.2), rtol=0, atol=0.01)
