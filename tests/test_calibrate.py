"""Calibration: every setting of every rule, what it was fitted on, and what the choice of T saw."""

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fewsure
from fewsure import persist
from fewsure.calibrate import CURVE, PRIORS, FittedRule, calibrate, fit_rules, read_rules, temperature_curve
from fewsure.config import CalibrateConfig
from fewsure.data import source
from fewsure.errors import FewsureError
from fewsure.metrics import expected_calibration_error
from fewsure.rules import LogitNormal, OpenSet, Softmax
from helpers import calibration, random_episodes

SETTINGS = {
    ("softmax", "converged"),
    ("softmax", "paper"),
    ("logit-normal", "search-std"),
    ("logit-normal", "search-var"),
    ("logit-normal", "T=1"),
    ("logit-normal", "paper-ece"),
    ("logit-normal", "strangers"),
    ("open-set", "prior"),
    ("open-set", "ece-budget"),
}
HEADLINES = {("softmax", "converged"), ("logit-normal", "search-std"), ("open-set", "prior")}


def keys(rules: list[FittedRule]) -> set[tuple[str, str]]:
    assert len(rules) == len({(f.rule.name, f.setting) for f in rules})
    return {(f.rule.name, f.setting) for f in rules}


def fit(sharpness: float = 1.0, **changes) -> dict[str, FittedRule]:
    prediction, labels = calibration(sharpness)
    return {f.setting: f for f in fit_rules(prediction, labels, source("moons"), CalibrateConfig(**changes))}


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


def test_a_run_is_left_with_every_setting_and_one_headline_for_each_rule(tiny_run: Path) -> None:
    rules = read_rules(tiny_run)
    assert keys(rules) == SETTINGS
    assert keys([f for f in rules if f.headline]) == HEADLINES
    for fitted in rules:
        saw_strangers = fitted.rule.name == "open-set" or fitted.setting == "strangers"
        assert fitted.fitted_on == ("box" if saw_strangers else None)
        assert (fitted.way, fitted.shot) == (2, 5)


def test_fitted_rules_are_kept_exactly(run: Path) -> None:
    returned = calibrate(run, CalibrateConfig(episodes=4))
    assert read_rules(run) == returned


def test_calibration_repeats_itself_and_follows_its_seed(run: Path) -> None:
    first, again = (calibrate(run, CalibrateConfig(episodes=4)) for _ in range(2))
    assert again == first
    assert calibrate(run, CalibrateConfig(episodes=4, seed=1)) != first


def test_the_settings_are_what_their_names_say() -> None:
    prediction, labels = calibration(1.3)
    fitted = fit(1.3, pi=0.1)
    assert fitted["converged"].rule == Softmax.fit(prediction, labels)
    assert fitted["paper"].rule == Softmax.fit(prediction, labels, how="paper")
    assert fitted["T=1"].rule == LogitNormal()
    assert fitted["search-std"].rule == LogitNormal.fit(prediction, labels)
    assert fitted["search-var"].rule == LogitNormal.fit(prediction, labels, scale="var")
    assert fitted["strangers"].rule == LogitNormal.fit(prediction, labels, how="strangers")
    assert fitted["prior"].rule == OpenSet.fit(prediction, labels, pi=0.1)


def test_a_search_that_ended_at_its_cap_says_so() -> None:
    assert fit(0.5, temperature_cap=3)["search-std"].report == {"cap": 3, "reached_cap": True}
    assert fit(4.0, temperature_cap=3)["search-std"].report == {"cap": 3, "reached_cap": False}


def test_the_papers_ece_is_the_target_unless_another_is_given() -> None:
    prediction, labels = calibration()
    assert fit()["paper-ece"].report == {"target_ece": 4.69}  # the paper's on moons
    asked = fit(target_ece=8.0)["paper-ece"]
    assert asked.report == {"target_ece": 8.0}
    assert asked.rule.id_ece(prediction, labels) == pytest.approx(8.0, abs=0.7)


def test_the_largest_prior_within_the_ece_budget_is_taken() -> None:
    prediction, labels = calibration()
    prediction = replace(prediction, energy=None)
    known = labels >= 0
    openset = OpenSet.fit(prediction, labels)

    def ece(pi: float) -> float:  # with the unknown mass spread evenly, as the tables read it
        log_probs = openset.at_prior(pi)(prediction)
        confidence, guess = (log_probs[..., :-1].exp() + log_probs[..., -1:].exp() / 4).max(-1)
        return expected_calibration_error(confidence[known].numpy(), (guess == labels)[known].numpy())

    def chosen(budget: float) -> float:
        rules = fit_rules(prediction, labels, source("moons"), CalibrateConfig(ece_budget=budget))
        return next(f.rule.pi for f in rules if f.setting == "ece-budget")

    costs = [ece(pi) for pi in PRIORS]
    budget = sum(sorted(costs)[9:11]) / 2
    assert chosen(budget) == next(pi for pi, cost in zip(PRIORS, costs, strict=True) if cost <= budget)
    assert chosen(1e-9) == PRIORS[-1]
    assert chosen(100.0) == PRIORS[0]


def test_priors_are_twenty_from_a_fifth_to_half_a_percent() -> None:
    assert len(PRIORS) == 20
    assert PRIORS[0] == pytest.approx(0.2)
    assert PRIORS[-1] == pytest.approx(0.005)
    ratios = [b / a for a, b in pairwise(PRIORS)]
    assert ratios == pytest.approx([ratios[0]] * 19)


def test_a_prediction_without_energy_is_calibrated_by_the_other_rules() -> None:
    prediction, labels = calibration()
    without = replace(prediction, energy=None)
    rules = fit_rules(without, labels, source("moons"), CalibrateConfig())
    assert keys(rules) == {key for key in SETTINGS if key[0] != "logit-normal"}
    assert temperature_curve(without, labels) == []


def test_the_curve_shows_what_the_search_for_t_sees() -> None:
    prediction, labels = calibration(1.3)
    curve = temperature_curve(prediction, labels)
    assert [row["T"] for row in curve] == list(CURVE)
    known = labels >= 0
    deterministic = torch.nn.functional.cross_entropy(prediction.logits[known], labels[known]).item()
    for row in curve:
        assert row["deterministic_nll"] == pytest.approx(deterministic, rel=1e-5)
        assert row["nll"] == pytest.approx(LogitNormal(row["T"]).id_nll(prediction, labels))
    assert curve[-1]["nll"] == pytest.approx(deterministic, abs=0.01)  # at a high T nothing is left of the sampling


def test_calibration_may_go_to_another_folder_with_the_model(run: Path, tmp_path: Path) -> None:
    before = (run / persist.RULES).read_bytes()
    returned = calibrate(run, CalibrateConfig(episodes=3, seed=5), out=tmp_path / "out")
    assert (run / persist.RULES).read_bytes() == before
    assert read_rules(tmp_path / "out") == returned
    episodes = random_episodes()
    copied, original = (fewsure.load(folder).predict(episodes).logits for folder in (tmp_path / "out", run))
    assert torch.equal(copied, original)
    assert persist.read_config(tmp_path / "out") == persist.read_config(run)


def test_another_way_and_shot_is_recorded(run: Path) -> None:
    rules = calibrate(run, CalibrateConfig(way=1, shot=2, episodes=4))
    assert {(f.way, f.shot) for f in rules} == {(1, 2)}
    assert all(math.isfinite(f.rule.params().get("temperature", 1.0)) for f in rules)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CalibrateConfig(episodes=0), "episodes is 0"),
        (CalibrateConfig(pi=0.0), "pi is 0.0"),
        (CalibrateConfig(pi=1.0), "pi is 1.0: expected a number between 0 and 1"),
        (CalibrateConfig(ece_budget=-1.0), "ece_budget is -1.0"),
        (CalibrateConfig(temperature_cap=0), "temperature_cap is 0"),
        (CalibrateConfig(way=3), "moons with 3 classes"),
        (CalibrateConfig(device="abacus"), "device 'abacus' cannot be used here"),
    ],
)
def test_a_bad_configuration_is_named_and_changes_nothing(config: CalibrateConfig, message: str, run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(FewsureError, match=message):
        calibrate(run, config)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_method_saved_without_its_training_is_told_what_is_missing(tmp_path: Path) -> None:
    fewsure.save(fewsure.build("protonet"), tmp_path)
    with pytest.raises(FewsureError, match="does not say what its method was trained on: make it with `fewsure train`"):
        calibrate(tmp_path, CalibrateConfig(episodes=2))


@pytest.mark.parametrize("content", [{}, [], {"rules": [{"rule": "softmax"}]}, {"rules": [{"nonsense": 1}]}])
def test_rules_that_are_no_rules_are_named(content: object, tmp_path: Path) -> None:
    (tmp_path / persist.RULES).write_text(json.dumps(content))
    with pytest.raises(FewsureError, match=r"does not hold fitted rules .*: calibrate the run again"):
        read_rules(tmp_path)
