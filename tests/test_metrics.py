"""Every metric against scikit-learn or a plain loop, on inputs with ties and with confidences of exactly 0 and 1."""

from dataclasses import fields, replace

import numpy as np
import pytest
from numpy import ndarray as Array
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from fewsure.metrics import (
    BINS,
    METRICS,
    OF_PREDICTION,
    Scores,
    expected_calibration_error,
    measure,
    reliability,
    resamples,
    value,
)

every_metric = pytest.mark.parametrize(("condition", "name"), METRICS, ids=["/".join(key) for key in METRICS])


def make_scores(seed: int = 0, episodes: int = 8, known: int = 30, strangers: int = 20) -> Scores:
    rng = np.random.default_rng(seed)
    size = episodes * (known + strangers)
    is_known = np.tile(np.arange(known + strangers) < known, episodes)
    confidence = rng.beta(2, 1, size)
    return Scores(
        episode=np.repeat(np.arange(episodes), known + strangers),
        known=is_known,
        confidence=confidence,
        correct=rng.random(size) < confidence,
        nll=rng.exponential(size=size),
        brier=rng.random(size),
        strangeness=rng.normal(size=size) + ~is_known,
        open_loss=rng.exponential(size=size),
    )


SMOOTH = make_scores()
CASES = {
    "smooth": SMOOTH,
    # Strangeness and confidence in steps, confidences of exactly 0 and 1 among them.
    "tied": replace(SMOOTH, strangeness=np.round(SMOOTH.strangeness), confidence=np.round(SMOOTH.confidence * 4) / 4),
    "saturated": replace(
        SMOOTH, strangeness=np.where(SMOOTH.strangeness > 0, 1e30, -1e30), confidence=np.ones(len(SMOOTH))
    ),
    "separated": replace(SMOOTH, strangeness=SMOOTH.strangeness + 100.0 * ~SMOOTH.known),
    "reversed": replace(SMOOTH, strangeness=SMOOTH.strangeness - 100.0 * ~SMOOTH.known),
    "constant": replace(SMOOTH, strangeness=np.zeros(len(SMOOTH)), confidence=np.zeros(len(SMOOTH))),
}
every_case = pytest.mark.parametrize("scores", CASES.values(), ids=CASES)


def select(scores: Scores, rows: Array) -> Scores:
    return Scores(*(getattr(scores, field.name)[rows] for field in fields(Scores)))


def exactly(expected: float) -> object:
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


@every_case
def test_means_over_known_queries(scores: Scores) -> None:
    known = scores.known
    assert value(scores, "id", "accuracy") == exactly(100 * scores.correct[known].mean())
    assert value(scores, "id", "nll") == exactly(scores.nll[known].mean())
    assert value(scores, "id", "brier") == exactly(scores.brier[known].mean())


@every_case
def test_auroc_and_aupr_agree_with_sklearn(scores: Scores) -> None:
    assert value(scores, "ood", "auroc") == exactly(roc_auc_score(~scores.known, scores.strangeness))
    assert value(scores, "ood", "aupr") == exactly(average_precision_score(~scores.known, scores.strangeness))


@every_case
@pytest.mark.parametrize(("name", "of"), [("auroc_episode", roc_auc_score), ("aupr_episode", average_precision_score)])
def test_ranking_by_episode_is_the_mean_of_sklearns(scores: Scores, name: str, of) -> None:
    each = [select(scores, scores.episode == episode) for episode in range(scores.episodes)]
    assert value(scores, "ood", name) == exactly(np.mean([of(~s.known, s.strangeness) for s in each]))


@every_case
def test_fpr95_is_read_off_sklearns_roc_with_knowns_as_positives(scores: Scores) -> None:
    fpr, tpr, _ = roc_curve(scores.known, -scores.strangeness, drop_intermediate=False)
    assert value(scores, "ood", "fpr95") == exactly(100 * fpr[tpr >= 0.95 - 1e-12][0])


def test_fpr95_keeps_exactly_95_percent_when_it_can() -> None:
    known = np.arange(120) < 100
    strangeness = np.concatenate([np.arange(100.0), np.full(10, 94.5), np.full(10, 93.5)])
    scores = replace(select(SMOOTH, np.arange(120)), known=known, strangeness=strangeness, episode=np.zeros(120, int))
    assert value(scores, "ood", "fpr95") == exactly(50.0)  # 95 to 99 are refused, and with them the 94.5


@every_case
def test_openauc_counts_pairs_whose_known_is_labelled_rightly_and_less_strange(scores: Scores) -> None:
    known, strangers = select(scores, scores.known), select(scores, ~scores.known)
    difference = strangers.strangeness[None, :] - known.strangeness[:, None]
    pairs = ((difference > 0) + 0.5 * (difference == 0)) * known.correct[:, None]
    assert value(scores, "ood", "openauc") == exactly(pairs.mean())


@every_case
def test_aurc_is_the_mean_risk_over_all_coverages(scores: Scores) -> None:
    known = select(scores, scores.known)
    risks = [1 - known.correct[known.confidence >= threshold].mean() for threshold in known.confidence]
    assert value(scores, "id", "aurc") == exactly(100 * np.mean(risks))


def plain_ece(confidence: Array, correct: Array, bins: int) -> float:
    total = 0.0
    for index in range(bins):
        low, high = index / bins, (index + 1) / bins
        inside = (confidence > low) & (confidence <= high)
        if index == 0:
            inside |= confidence == 0
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    return 100 * total


@every_case
@pytest.mark.parametrize("bins", [1, 4, 15, 100])
@pytest.mark.parametrize("condition", ["id", "ood"])
def test_ece_agrees_with_a_plain_loop(scores: Scores, bins: int, condition: str) -> None:
    scores_of = select(scores, scores.known == (condition == "id"))
    expected = plain_ece(scores_of.confidence, scores_of.correct, bins)
    assert value(scores, condition, "ece", bins=bins) == exactly(expected)
    assert expected_calibration_error(scores_of.confidence, scores_of.correct, bins) == exactly(expected)
    each = [select(scores_of, scores_of.episode == episode) for episode in range(scores.episodes)]
    by_episode = np.mean([plain_ece(s.confidence, s.correct, bins) for s in each])
    assert value(scores, condition, "ece_episode", bins=bins) == exactly(by_episode)


@pytest.mark.parametrize(("correct", "expected"), [(1.0, 0.0), (0.0, 100.0), (0.75, 25.0)])
def test_confidence_of_exactly_one_is_in_the_last_bin(correct: float, expected: float) -> None:
    right = np.arange(100) < 100 * correct
    assert expected_calibration_error(np.ones(100), right) == exactly(expected)
    # Beside confidences just below, which are in the same bin: one gap, not two.
    confidence = np.where(right, 1.0, 1 - 1e-9)
    assert expected_calibration_error(confidence, right) == pytest.approx(expected, abs=1e-5)


@every_case
def test_the_open_score_weighs_both_kinds_evenly(scores: Scores) -> None:
    known = scores.known
    expected = 0.5 * (scores.open_loss[known].mean() + scores.open_loss[~known].mean())
    assert value(scores, "ood", "open_score") == exactly(expected)


def test_there_is_no_open_score_without_an_unknown() -> None:
    scores = replace(SMOOTH, open_loss=np.where(SMOOTH.known, SMOOTH.open_loss, np.inf))
    assert value(scores, "ood", "open_score") is None
    assert measure(scores, "ood", "open_score") is None
    assert measure(scores, "ood", "auroc") is not None


@every_metric
def test_a_metric_without_queries_of_its_kind_is_none(condition: str, name: str) -> None:
    known, strangers = select(SMOOTH, SMOOTH.known), select(SMOOTH, ~SMOOTH.known)
    assert (value(known, condition, name) is None) == (condition == "ood")
    assert value(strangers, condition, name) is None
    assert measure(strangers, condition, name) is None


@every_metric
def test_merged_parts_equal_the_whole(condition: str, name: str) -> None:
    order = np.random.default_rng(0).permutation(len(SMOOTH))
    parts = [select(SMOOTH, rows) for rows in np.array_split(order, 5)]
    merged = measure(Scores.merge(parts), condition, name)
    whole = measure(SMOOTH, condition, name)
    assert merged.value == exactly(whole.value)
    np.testing.assert_allclose(merged.replicates, whole.replicates, rtol=1e-9)


@every_metric
@pytest.mark.parametrize("case", ["smooth", "tied", "saturated"])
def test_weighing_an_episode_is_duplicating_it(condition: str, name: str, case: str) -> None:
    scores = CASES[case]
    weights = np.array([2, 0, 1, 3, 1, 0, 1, 1])
    copies = [
        replace(rows, episode=np.full(len(rows), copy))
        for copy, episode in enumerate(np.repeat(np.arange(8), weights))
        for rows in [select(scores, scores.episode == episode)]
    ]
    weighted = METRICS[condition, name](scores, BINS)(weights.astype(float))
    assert weighted == exactly(value(Scores.merge(copies), condition, name))


@every_metric
def test_an_estimate_is_its_value_within_its_interval(condition: str, name: str) -> None:
    estimate = measure(SMOOTH, condition, name)
    assert estimate.value == value(SMOOTH, condition, name)
    assert estimate.replicates.shape == (200,)
    assert estimate.low < estimate.high
    assert (estimate.low, estimate.high) == tuple(np.quantile(estimate.replicates, [0.025, 0.975]))
    slack = 0.2 * (estimate.high - estimate.low)  # ECE and its like are biased upwards in a resample
    assert estimate.low - slack <= estimate.value <= estimate.high + slack


@every_metric
def test_strangers_in_some_episodes_only_are_enough(condition: str, name: str) -> None:
    scores = select(SMOOTH, SMOOTH.known | (SMOOTH.episode < 3))
    estimate = measure(scores, condition, name)
    assert np.isfinite(estimate.value)
    assert np.isfinite([estimate.low, estimate.high]).all()


def test_one_episode_alone_has_an_interval_without_width() -> None:
    estimate = measure(make_scores(episodes=1), "id", "accuracy")
    assert estimate.low == estimate.value == estimate.high


def test_resamples_are_shared_by_all_with_as_many_episodes() -> None:
    resamples.cache_clear()
    first = resamples(8)
    resamples.cache_clear()
    assert (resamples(8) == first).all()
    assert (resamples(8).sum(1) == 8).all()
    assert len(np.unique(resamples(8), axis=0)) > 150


@pytest.mark.parametrize("name", sorted(OF_PREDICTION))
def test_metrics_of_the_prediction_do_not_see_the_rule(name: str) -> None:
    """Only what a rule decides may change: confidence, NLL, Brier score and the open loss."""
    rng = np.random.default_rng(1)
    other = {key: rng.random(len(SMOOTH)) for key in ("confidence", "nll", "brier", "open_loss")}
    for condition in {key[0] for key in METRICS if key[1] == name}:
        assert value(replace(SMOOTH, **other), condition, name) == value(SMOOTH, condition, name)


@pytest.mark.parametrize("name", sorted({key[1] for key in METRICS} - OF_PREDICTION))
def test_the_other_metrics_do(name: str) -> None:
    rng = np.random.default_rng(1)
    other = {key: rng.random(len(SMOOTH)) for key in ("confidence", "nll", "brier", "open_loss")}
    for condition in {key[0] for key in METRICS if key[1] == name}:
        assert value(replace(SMOOTH, **other), condition, name) != value(SMOOTH, condition, name)


def accuracies(rng: np.random.Generator, episodes: int, queries: int = 20) -> tuple[Scores, Scores]:
    """Two methods on the same episodes, some of which are harder than others; the second is right 5 % more often."""
    ease = np.repeat(rng.uniform(0.5, 0.9, episodes), queries)
    luck = rng.random(len(ease))
    blank = np.zeros(len(ease))
    rest = {"confidence": blank, "nll": blank, "brier": blank, "strangeness": blank, "open_loss": blank}
    episode, known = np.repeat(np.arange(episodes), queries), np.ones(len(ease), bool)
    first, second = (Scores(episode=episode, known=known, correct=luck < ease + gain, **rest) for gain in (0, 0.05))
    return first, second


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    estimates = [measure(accuracies(rng, 60)[0], "id", "accuracy") for _ in range(600)]
    covered = np.mean([e.low <= 70 <= e.high for e in estimates])
    assert 0.91 <= covered <= 0.97
    widths = np.mean([e.high - e.low for e in estimates])
    assert widths == pytest.approx(2 * 1.96 * np.std([e.value for e in estimates]), rel=0.2)


def test_a_paired_difference_is_narrower_than_two_intervals() -> None:
    rng = np.random.default_rng(0)
    first, second = (measure(scores, "id", "accuracy") for scores in accuracies(rng, 60))
    difference = second - first
    assert difference.value == exactly(second.value - first.value)
    assert difference.low > 0  # the gain shows, though the two intervals overlap
    assert first.high > second.low
    unpaired = np.hypot(first.high - first.low, second.high - second.low)
    assert difference.high - difference.low < 0.5 * unpaired


def test_reliability_holds_every_query_and_the_ece() -> None:
    for rows in (SMOOTH.known, ~SMOOTH.known):
        count, confidence, accuracy = reliability(SMOOTH, rows)
        assert count.sum() == rows.sum()
        full = count > 0
        assert np.isnan(confidence[~full]).all()
        gaps = count[full] @ np.abs(confidence - accuracy)[full] / count.sum()
        assert 100 * gaps == exactly(expected_calibration_error(SMOOTH.confidence[rows], SMOOTH.correct[rows]))
        edges = np.arange(BINS + 1) / BINS
        inside = (edges[:-1][full] < confidence[full]) & (confidence[full] <= edges[1:][full])
        assert inside.all()
