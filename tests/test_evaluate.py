"""Evaluation: hand-made predictions scored, the same episodes for all, and result rows with all their columns."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error
from torch import Tensor

import fewsure
from fewsure import evaluate as evaluate_module
from fewsure import metrics, persist, predicting
from fewsure.calibrate import CURVE, PRIORS, calibrate, read_rules
from fewsure.config import CalibrateConfig, EvaluateConfig, TrainConfig
from fewsure.data import source
from fewsure.episodes import Episodes, generator
from fewsure.errors import FewsureError
from fewsure.evaluate import REPLICATES, evaluate, score
from fewsure.metrics import METRICS
from fewsure.predicting import predict_all
from fewsure.rules import LogitNormal, OpenSet, Rule, Softmax
from fewsure.task import Prediction
from fewsure.train import train
from helpers import calibration, make

COLUMNS = {
    *("dataset", "split", "backbone", "method", "rank", "way", "shot", "train_way", "train_shot", "train_tasks"),
    *("seed", "rule", "rule_params", "fitted_on", "condition", "strangers", "level", "metric", "value", "low", "high"),
    "episodes",
}
TINY = EvaluateConfig(episodes=4, stranger_episodes=1)


def results(folder: Path) -> dict:
    return json.loads((folder / persist.RESULTS).read_text())


def frontier(folder: Path) -> dict:
    return json.loads((folder / persist.FRONTIER).read_text())


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A calibrated run that a test may change."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


# scoring


def test_scores_of_known_queries_agree_with_sklearn() -> None:
    prediction, labels = calibration(3.0, strangers=0)
    rule = Softmax(2.0)
    scores = score(prediction, labels, rule)
    probabilities = rule(prediction)[0, :, :-1].double().softmax(-1).numpy()
    truth, onehot = labels[0].numpy(), np.eye(4)[labels[0].numpy()]
    assert metrics.value(scores, "id", "accuracy") == pytest.approx(
        100 * accuracy_score(truth, probabilities.argmax(-1))
    )
    assert metrics.value(scores, "id", "nll") == pytest.approx(
        log_loss(truth, probabilities, labels=range(4)), rel=1e-4
    )
    brier = mean_squared_error(onehot, probabilities, multioutput="raw_values").sum()
    assert metrics.value(scores, "id", "brier") == pytest.approx(brier, rel=1e-4)
    np.testing.assert_allclose(scores.confidence, probabilities.max(-1), rtol=1e-5)


def test_a_prediction_made_by_hand_is_scored_as_one_works_it_out() -> None:
    """Two episodes of a query each right and wrong, and a stranger; the open-set rule spreads its unknown evenly."""
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]]])
    labels = torch.tensor([[0, 0, -1], [1, 1, -1]])
    prediction = Prediction(logits, torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]))
    rule = OpenSet(beta=1.0, a=1.0, b=1.0, pi=0.2)
    scores = score(prediction, labels, rule, first_episode=5)

    odds = np.exp(np.array([-1.0, 0.0, 1.0]))  # of a stranger at even odds
    unknown = np.tile(odds * 0.25 / (1 + odds * 0.25), 2)
    softmax = logits.softmax(-1).flatten(0, 1).numpy()
    probabilities = (1 - unknown)[:, None] * softmax + unknown[:, None] / 2
    assert scores.episode.tolist() == [5, 5, 5, 6, 6, 6]
    assert scores.known.tolist() == [True, True, False] * 2
    assert scores.correct[scores.known].tolist() == [True, False, True, False]
    np.testing.assert_allclose(scores.confidence, probabilities.max(-1), rtol=1e-5)
    np.testing.assert_allclose(scores.strangeness, [0, 1, 2] * 2)
    known, truth = np.array([0, 1, 3, 4]), np.array([0, 0, 1, 1])
    np.testing.assert_allclose(scores.nll[known], -np.log(probabilities[known, truth]), rtol=1e-5)
    brier = ((probabilities[known] - np.eye(2)[truth]) ** 2).sum(-1)
    np.testing.assert_allclose(scores.brier[known], brier, rtol=1e-5)
    even = np.tile(odds / (1 + odds), 2)  # at pi = 1/2, whatever the rule's own
    np.testing.assert_allclose(scores.open_loss[[2, 5]], -np.log(even[[2, 5]]), rtol=1e-5)
    np.testing.assert_allclose(scores.open_loss[known], -np.log((1 - even[known]) * softmax[known, truth]), rtol=1e-5)


@pytest.mark.parametrize("rule", [Softmax(), LogitNormal()], ids=repr)
def test_a_rule_without_an_unknown_loses_infinitely_on_strangers(rule: Rule) -> None:
    prediction, labels = calibration(known=20, strangers=20)
    scores = score(prediction, labels, rule)
    assert np.isinf(scores.open_loss[~scores.known]).all()
    assert np.isfinite(scores.open_loss[scores.known]).all()
    assert metrics.value(scores, "ood", "open_score") is None


def test_labels_of_strangers_are_uniform_in_expectation() -> None:
    """What is scored is the mean over many draws of a label for every stranger."""
    prediction, labels = calibration(known=0, strangers=300)
    scores, rule = score(prediction, labels, Softmax()), Softmax()
    probabilities = rule(prediction)[0, :, :-1].exp().double()
    drawn = torch.randint(4, (4000, 300), generator=generator(0))
    right = (drawn == probabilities.argmax(-1)).double().mean(0)
    assert (scores.correct == 0.25).all()
    assert right.mean() == pytest.approx(0.25, abs=0.002)
    nll = -probabilities.log().gather(-1, drawn.T).mean(-1)
    np.testing.assert_allclose(scores.nll, nll, rtol=0.1)
    assert scores.nll.mean() == pytest.approx(nll.mean().item(), rel=0.002)
    onehot = torch.eye(4, dtype=torch.float64)[drawn]
    brier = (probabilities - onehot).square().sum(-1).mean(0)
    assert scores.brier.mean() == pytest.approx(brier.mean().item(), rel=0.005)


def test_the_label_is_that_of_the_logits_whatever_the_rule_makes_of_them() -> None:
    prediction, labels = calibration(known=500, strangers=0)
    accuracy = {
        metrics.value(score(prediction, labels, rule), "id", "accuracy")
        for rule in (Softmax(), Softmax(1e4), LogitNormal(0.01), OpenSet(1.0, 50.0, 0.0, 0.99))
    }
    assert len(accuracy) == 1


# predicting


@pytest.mark.parametrize("chunk", [1, 150, 10**6])
def test_chunks_do_not_change_predictions(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method, moons = make(("protomahalanobis", 1)), source("moons")
    episodes = moons.draw(5, generator(0, "chunks"), "box")
    ((whole, labels),) = predict_all(method, moons, episodes)
    monkeypatch.setattr(predicting, "CHUNK_QUERIES", chunk)
    parts = list(predict_all(method, moons, episodes))
    assert len(parts) == {1: 5, 150: 5, 10**6: 1}[chunk]
    torch.testing.assert_close(Prediction.cat([p for p, _ in parts]).logits, whole.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat([y for _, y in parts]), labels)


def test_predicting_leaves_no_gradient_and_evaluates() -> None:
    method, moons = make(("protonet", None)).train(), source("moons")
    ((prediction, _),) = predict_all(method, moons, moons.draw(2, generator(0)))
    assert not prediction.logits.requires_grad
    assert not method.training


# whole evaluations


def test_rows_have_every_column(tiny_run: Path) -> None:
    rows = results(tiny_run)["rows"]
    for row in rows:
        assert row.keys() >= COLUMNS
        assert (row["dataset"], row["split"], row["backbone"]) == ("moons", "test", "fc")
        assert (row["method"], row["rank"], row["way"], row["shot"], row["seed"]) == ("protomahalanobis", 1, 2, 5, 0)
        assert row["train_tasks"] == 160
        assert row["strangers"] == ("grid" if row["condition"] == "ood" else None)
        assert row["episodes"] == (1 if row["condition"] == "ood" else 4)
        assert row["low"] <= row["high"]
        assert all(math.isfinite(row[key]) for key in ("value", "low", "high"))


def test_each_rule_is_measured_at_its_headline_setting_by_every_metric(tiny_run: Path) -> None:
    rows = results(tiny_run)["rows"]
    headlines = {f.rule.name: f for f in read_rules(tiny_run) if f.headline}
    assert headlines.keys() == {"softmax", "logit-normal", "open-set"}
    for name, fitted in headlines.items():
        of_rule = [row for row in rows if row["rule"] == name]
        undefined = set() if name == "open-set" else {("ood", "open_score")}
        assert {(row["condition"], row["metric"]) for row in of_rule} == METRICS.keys() - undefined
        assert len(of_rule) == len(METRICS) - len(undefined)
        for row in of_rule:
            assert row["rule_params"] == fitted.rule.params()
            assert row["fitted_on"] == ("box" if name == "open-set" else None)


def test_replicates_are_kept_for_paired_differences(tiny_run: Path) -> None:
    replicates, _ = persist.read_tensors(tiny_run / REPLICATES)
    for row in results(tiny_run)["rows"]:
        drawn = replicates[f"{row['rule']}/{row['condition']}/{row['metric']}"]
        assert np.nanquantile(drawn.numpy(), [0.025, 0.975]) == pytest.approx((row["low"], row["high"]))


def test_reliability_tables_hold_every_query_and_the_ece(tiny_run: Path) -> None:
    content = results(tiny_run)
    for table in content["reliability"]:
        for condition, queries in (("id", 4 * 100), ("ood", 10_000)):
            count, confidence, accuracy = (
                np.array(table[condition][k], float) for k in ("count", "confidence", "accuracy")
            )
            assert count.sum() == queries
            ece = 100 * np.nansum(count * np.abs(confidence - accuracy)) / queries
            (row,) = (
                row
                for row in content["rows"]
                if (row["rule"], row["condition"], row["metric"]) == (table["rule"], condition, "ece")
            )
            assert ece == pytest.approx(row["value"])
            assert [x is None for x in table[condition]["accuracy"]] == (count == 0).tolist()


def test_results_say_what_they_depend_on(tiny_run: Path) -> None:
    for content in (results(tiny_run), frontier(tiny_run)):
        about = content["about"]
        assert about["fewsure"] == fewsure.__version__
        assert about["torch"] == torch.__version__
        assert about["threads"] == 1
        assert about["device"].startswith("cpu")
        assert {"python", "revision", "evaluate", "train", "model"} <= about.keys()


def test_the_frontier_has_every_setting_and_a_curve_for_each_parameter(tiny_run: Path) -> None:
    points = frontier(tiny_run)["points"]
    settings = [(point["rule"], point["setting"]) for point in points]
    for fitted in read_rules(tiny_run):
        assert (fitted.rule.name, fitted.setting) in settings
    curves = {
        rule: [point["rule_params"] for point in points if (point["rule"], point["setting"]) == (rule, "curve")]
        for rule in ("logit-normal", "open-set")
    }
    assert [params["temperature"] for params in curves["logit-normal"]] == list(CURVE)
    assert [params["pi"] for params in curves["open-set"]] == PRIORS[::2]
    assert settings.count(("softmax", "T=1")) == 1
    for point in points:
        assert all(math.isfinite(point[key]) for key in ("id_nll", "id_ece", "id_ece_episode", "ood_ece"))
        assert (point["ood_open_score"] is None) == (point["rule"] != "open-set")


def test_along_the_open_set_curve_caution_is_bought_with_nll(tiny_run: Path) -> None:
    points = [p for p in frontier(tiny_run)["points"] if (p["rule"], p["setting"]) == ("open-set", "curve")]
    cautious, bold = points[0], points[-1]  # pi falls along the curve
    assert cautious["ood_ece"] < bold["ood_ece"]
    assert cautious["id_nll"] > bold["id_nll"]


def test_headline_points_agree_with_the_rows(tiny_run: Path) -> None:
    rows, points = results(tiny_run)["rows"], frontier(tiny_run)["points"]
    for fitted in (f for f in read_rules(tiny_run) if f.headline):
        (point,) = (p for p in points if (p["rule"], p["setting"]) == (fitted.rule.name, fitted.setting))
        for metric in ("nll", "ece"):  # of known queries, which are not thinned for the frontier
            (row,) = (r for r in rows if (r["rule"], r["condition"], r["metric"]) == (fitted.rule.name, "id", metric))
            assert point[f"id_{metric}"] == pytest.approx(row["value"])


def test_an_evaluation_repeats_itself(run: Path) -> None:
    before = results(run)
    evaluate(run, TINY)
    after = results(run)
    assert after["rows"] == before["rows"]
    assert after["reliability"] == before["reliability"]


def test_every_method_is_shown_the_same_episodes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    train(TrainConfig(method="protonet", train_tasks=8, tasks_per_step=4, validation_tasks=2, seed=3), other)
    calibrate(other, CalibrateConfig(episodes=4))
    shown: list[list[Tensor]] = []
    real = evaluate_module.predict_all

    def recording(method, source, *batches: Episodes, device):
        shown[-1] += [t for episodes in batches for t in (episodes.support, episodes.query, episodes.labels)]
        return real(method, source, *batches, device=device)

    monkeypatch.setattr(evaluate_module, "predict_all", recording)
    for folder in (run, other):
        shown.append([])
        evaluate(folder, TINY)
    assert len(shown[0]) == len(shown[1]) == 6  # episodes with strangers, and without
    assert all(torch.equal(a, b) for a, b in zip(*shown, strict=True))


def test_another_seed_shows_other_episodes(run: Path) -> None:
    before = results(run)["rows"]
    after = evaluate(run, EvaluateConfig(episodes=4, stranger_episodes=1, seed=1))
    assert [row["value"] for row in after] != [row["value"] for row in before]


@pytest.mark.parametrize("chunk", [1, 10**7])
def test_chunks_do_not_change_results(chunk: int, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = results(run)["rows"]
    monkeypatch.setattr(predicting, "CHUNK_QUERIES", chunk)
    after = evaluate(run, TINY)
    assert [row["value"] for row in after] == pytest.approx([row["value"] for row in before], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(("way", "shot"), [(1, 5), (2, 1)])
def test_another_way_and_shot_than_in_training(way: int, shot: int, run: Path) -> None:
    asked = EvaluateConfig(way=way, shot=shot, episodes=3, stranger_episodes=1)
    with pytest.raises(FewsureError, match=f"fitted at 2-way 5-shot.*calibrate at {way}-way {shot}-shot"):
        evaluate(run, asked)
    calibrate(run, CalibrateConfig(way=way, shot=shot, episodes=4))
    rows = evaluate(run, asked)
    assert {(row["way"], row["shot"]) for row in rows} == {(way, shot)}
    if way == 1:
        assert {row["value"] for row in rows if (row["condition"], row["metric"]) == ("id", "accuracy")} == {100.0}


def test_without_strangers_there_is_no_ood_row(run: Path) -> None:
    rows = evaluate(run, EvaluateConfig(episodes=3, stranger_episodes=0))
    assert {row["condition"] for row in rows} == {"id"}


def test_results_may_go_to_another_folder(run: Path, tmp_path: Path) -> None:
    out, before = tmp_path / "out", (run / persist.RESULTS).read_bytes()
    evaluate(run, EvaluateConfig(episodes=2, stranger_episodes=0), out=out)
    assert (run / persist.RESULTS).read_bytes() == before
    assert {path.name for path in out.iterdir()} >= {persist.RESULTS, persist.FRONTIER, REPLICATES}
    for name in (persist.CONFIG, persist.MODEL, persist.RULES):  # which make it a whole run folder
        assert (out / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EvaluateConfig(episodes=0), "episodes is 0"),
        (EvaluateConfig(stranger_episodes=-1), "stranger_episodes is -1: expected 0 or more"),
        (EvaluateConfig(bins=0), "bins is 0"),
        (EvaluateConfig(way=3), "moons with 3 classes"),
        (EvaluateConfig(device="abacus"), "device 'abacus' cannot be used here"),
    ],
)
def test_a_bad_configuration_is_named_before_anything_is_written(
    config: EvaluateConfig, message: str, tiny_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(FewsureError, match=message):
        evaluate(tiny_run, config, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(FewsureError, match=r"cannot read .*config.json .*is its folder a run folder of fewsure\?"):
        evaluate(tmp_path / "nowhere", TINY)
    assert not (tmp_path / "nowhere").exists()


def test_an_uncalibrated_run_is_told_what_to_do(run: Path) -> None:
    (run / persist.RULES).unlink()
    with pytest.raises(FewsureError, match=r"has no rules.json: run `fewsure calibrate"):
        evaluate(run, TINY)
