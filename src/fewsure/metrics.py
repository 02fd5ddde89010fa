"""Metrics over scored queries, with intervals and paired differences.

`Scores` holds one row a query and merges by concatenation. A metric prepares its arrays once and is then a function of
a weight for each episode, so that one bootstrap over episodes serves them all; two methods evaluated on the same
episodes are resampled alike, so that the replicates of their difference are the differences of their replicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpy import ndarray as Array

BINS = 15
RESAMPLES = 200
Weighted = Callable[[Float[Array, " episodes"]], float]


@dataclass(frozen=True, eq=False)
class Scores:
    """What metrics need of every query. A stranger's label is uniform, as in the paper's tables, but in expectation:
    its columns hold the mean over all labels."""

    episode: Int[Array, " q"]
    known: Bool[Array, " q"]
    confidence: Float[Array, " q"]  # of the label that the logits give, the unknown mass spread evenly
    correct: Shaped[Array, " q"]  # 0 or 1; 1/N for a stranger
    nll: Float[Array, " q"]
    brier: Float[Array, " q"]
    strangeness: Float[Array, " q"]
    open_loss: Float[Array, " q"]  # at even odds of a stranger: -log p(its class), or -log p(unknown); infinite without

    def __len__(self) -> int:
        return len(self.episode)

    @staticmethod
    def merge(parts: Sequence[Scores]) -> Scores:
        return Scores(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Scores)))

    @property
    def episodes(self) -> int:
        return int(self.episode.max()) + 1

    @cached_property
    def ranking(self) -> Ranking:
        return Ranking(self)


class Ranking:
    """Known queries and strangers, each from the strangest down, and where they stand among one another.

    There may be fifty strangers for every known query, so everything is prepared to ask for one running sum over them.
    """

    def __init__(self, scores: Scores) -> None:
        order = np.argsort(-scores.strangeness, kind="stable")
        known, strangers = order[scores.known[order]], order[~scores.known[order]]
        self.known_episode, self.stranger_episode = scores.episode[known], scores.episode[strangers]
        self.right = scores.correct[known]
        known_fall, stranger_fall = -scores.strangeness[known], -scores.strangeness[strangers]
        #: For each known query, how many strangers are strictly stranger than it, and at least as strange.
        self.stranger = np.searchsorted(stranger_fall, known_fall, side="left")
        self.as_strange = np.searchsorted(stranger_fall, known_fall, side="right")
        #: For each known query, how many known queries are strictly stranger.
        self.known_stranger = np.searchsorted(known_fall, known_fall, side="left")
        #: The last stranger of each tie, and how many known queries are at least as strange.
        self.ends = np.flatnonzero(np.append(stranger_fall[1:] != stranger_fall[:-1], True))
        self.known_at = np.searchsorted(known_fall, stranger_fall[self.ends], side="right")

    def strangers(self, weights: Float[Array, " episodes"]) -> Float[Array, " counts"]:
        """Weight of the strangest 0, 1, 2, ... strangers."""
        return np.concatenate([[0.0], np.cumsum(weights[self.stranger_episode])])


def _mean(values: Float[Array, " q"], scores: Scores, condition: Bool[Array, " q"]) -> Weighted:
    """A mean over queries, from sums over each episode."""
    episode = scores.episode[condition]
    total = np.bincount(episode, values[condition], scores.episodes)
    count = np.bincount(episode, minlength=scores.episodes)
    return lambda w: float(w @ total / (w @ count))


def _bin_sums(scores: Scores, condition: Bool[Array, " q"], bins: int) -> Float[Array, "3 episodes bins"]:
    """Count, summed confidence and summed correctness, by episode and confidence bin."""
    confidence = scores.confidence[condition]
    cell = scores.episode[condition] * bins + _bin(confidence, bins)
    shape = (scores.episodes, bins)
    return np.stack(
        [
            np.bincount(cell, weight, scores.episodes * bins).reshape(shape)
            for weight in (np.ones_like(confidence), confidence, scores.correct[condition])
        ]
    )


def _bin(confidence: Float[Array, " q"], bins: int) -> Int[Array, " q"]:
    """Bins closed on the right, as Guo et al. have them; a confidence of exactly 1 (or 0) is in the last (first)."""
    return np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def expected_calibration_error(confidence: Float[Array, " q"], correct: Bool[Array, " q"], bins: int = BINS) -> float:
    """Pooled ECE in points: sum over bins of |summed confidence - summed correctness| / number of queries.

    >>> expected_calibration_error(np.array([1.0, 1.0, 0.5, 0.5]), np.array([True, True, True, False]))
    0.0
    """
    cell = _bin(confidence, bins)
    gap = np.bincount(cell, confidence - correct.astype(float), bins)
    return float(100 * np.abs(gap).sum() / len(confidence))


def reliability(scores: Scores, condition: Bool[Array, " q"], bins: int = BINS) -> Float[Array, "3 bins"]:
    """Count, mean confidence and accuracy of each bin (NaN where a bin is empty)."""
    count, confidence, correct = _bin_sums(scores, condition, bins).sum(1)
    with np.errstate(invalid="ignore"):
        return np.stack([count, confidence / count, correct / count])


def _ece(scores: Scores, condition: Bool[Array, " q"], bins: int) -> Weighted:
    count, confidence, correct = _bin_sums(scores, condition, bins)
    gap, size = confidence - correct, count.sum(1)
    return lambda w: float(100 * np.abs(w @ gap).sum() / (w @ size))


def _ece_episode(scores: Scores, condition: Bool[Array, " q"], bins: int) -> Weighted:
    count, confidence, correct = _bin_sums(scores, condition, bins)
    present = count.sum(1) > 0
    each = np.zeros(scores.episodes)
    each[present] = 100 * np.abs(confidence - correct).sum(1)[present] / count.sum(1)[present]
    return lambda w: float(w @ each / (w @ present))


def _auroc(scores: Scores, *, right_only: bool = False) -> Weighted:
    """Share of (known, stranger) pairs in which the stranger is stranger; ties count a half.

    With `right_only` (OpenAUC, Wang et al. 2022) a pair counts only where the known query is also labelled rightly.
    """
    ranking = scores.ranking
    counts = ranking.right if right_only else np.ones_like(ranking.right)

    def value(w: Float[Array, " episodes"]) -> float:
        strangers, known = ranking.strangers(w), w[ranking.known_episode]
        above = 0.5 * (strangers[ranking.stranger] + strangers[ranking.as_strange])
        return float((known * counts) @ above / (known.sum() * strangers[-1]))

    return value


def _aupr(scores: Scores) -> Weighted:
    """Average precision with strangers as the positive class."""
    ranking = scores.ranking

    def value(w: Float[Array, " episodes"]) -> float:
        found = ranking.strangers(w)[ranking.ends + 1]
        mistaken = np.concatenate([[0.0], np.cumsum(w[ranking.known_episode])])[ranking.known_at]
        with np.errstate(invalid="ignore"):  # leading thresholds may have no weight in a resample
            precision = np.nan_to_num(found / (found + mistaken))
        return float(np.diff(found, prepend=0) @ precision / found[-1])

    return value


def _fpr95(scores: Scores) -> Weighted:
    """Share of strangers taken for known, in points, at the threshold that keeps 95 % of the known queries."""
    ranking = scores.ranking

    def value(w: Float[Array, " episodes"]) -> float:
        known = np.concatenate([[0.0], np.cumsum(w[ranking.known_episode])])
        # The threshold is the strangeness of a known query: the lowest with at most 5 % of the known beyond it.
        beyond = known[ranking.known_stranger]
        last = np.searchsorted(beyond, 0.05 * known[-1] * (1 + 1e-12), side="right") - 1
        strangers = ranking.strangers(w)
        return float(100 * (1 - strangers[ranking.stranger[last]] / strangers[-1]))

    return value


def _aurc(scores: Scores) -> Weighted:
    """Area under the risk-coverage curve of the known queries by confidence, in points: the mean error rate of the
    most confident share, over all shares (ties share their risk)."""
    known = scores.known
    order = np.argsort(-scores.confidence[known], kind="stable")
    confidence = scores.confidence[known][order]
    episode, wrong = scores.episode[known][order], 1.0 - scores.correct[known][order]
    ends = np.flatnonzero(np.append(confidence[1:] != confidence[:-1], True))

    def value(w: Float[Array, " episodes"]) -> float:
        weight = w[episode]
        covered, errors = np.cumsum(weight)[ends], np.cumsum(weight * wrong)[ends]
        with np.errstate(invalid="ignore"):
            risk = np.nan_to_num(errors / covered)
        return float(100 * (np.diff(covered, prepend=0) @ risk) / covered[-1])

    return value


def _by_episode(metric: Callable[[Scores], Weighted]) -> Callable[[Scores], Weighted]:
    """The mean over episodes of a metric of each episode that has both known queries and strangers."""

    def prepare(scores: Scores) -> Weighted:
        each, present = np.zeros(scores.episodes), np.zeros(scores.episodes)
        for episode in np.unique(scores.episode[~scores.known]):
            rows = scores.episode == episode
            part = Scores(*(getattr(scores, f.name)[rows] for f in fields(Scores)))
            each[episode] = metric(part)(np.ones(scores.episodes))
            present[episode] = 1
        return lambda w: float(w @ each / (w @ present))

    return prepare


def _open_score(scores: Scores) -> Weighted:
    """The open score at even odds, a proper score of label and unknown together (nats)."""
    known = _mean(scores.open_loss, scores, scores.known)
    strangers = _mean(scores.open_loss, scores, ~scores.known)
    return lambda w: 0.5 * (known(w) + strangers(w))


Prepare = Callable[[Scores, int], Weighted]
#: (condition, name) -> how to prepare it, given the number of ECE bins. Accuracies, ECE, FPR and AURC are in points.
METRICS: dict[tuple[str, str], Prepare] = {
    ("id", "accuracy"): lambda s, _: _mean(100.0 * s.correct, s, s.known),
    ("id", "nll"): lambda s, _: _mean(s.nll, s, s.known),
    ("id", "ece"): lambda s, bins: _ece(s, s.known, bins),
    ("id", "ece_episode"): lambda s, bins: _ece_episode(s, s.known, bins),
    ("id", "brier"): lambda s, _: _mean(s.brier, s, s.known),
    ("id", "aurc"): lambda s, _: _aurc(s),
    ("ood", "ece"): lambda s, bins: _ece(s, ~s.known, bins),
    ("ood", "ece_episode"): lambda s, bins: _ece_episode(s, ~s.known, bins),
    ("ood", "auroc"): lambda s, _: _auroc(s),
    ("ood", "auroc_episode"): lambda s, _: _by_episode(_auroc)(s),
    ("ood", "aupr"): lambda s, _: _aupr(s),
    ("ood", "aupr_episode"): lambda s, _: _by_episode(_aupr)(s),
    ("ood", "fpr95"): lambda s, _: _fpr95(s),
    ("ood", "openauc"): lambda s, _: _auroc(s, right_only=True),
    ("ood", "open_score"): lambda s, _: _open_score(s),
}
#: These depend on the prediction alone, not on the rule.
OF_PREDICTION = {"accuracy", "auroc", "auroc_episode", "aupr", "aupr_episode", "fpr95", "openauc"}


@dataclass(frozen=True, eq=False)
class Estimate:
    """A value with its 95 % percentile interval over episodes, and the bootstrap replicates behind it."""

    value: float
    replicates: Float[Array, " resamples"]

    @property
    def low(self) -> float:
        return float(np.nanquantile(self.replicates, 0.025))

    @property
    def high(self) -> float:
        return float(np.nanquantile(self.replicates, 0.975))

    def __sub__(self, other: Estimate) -> Estimate:
        """The paired difference of one metric between two methods (or rules) on the same episodes."""
        return Estimate(self.value - other.value, self.replicates - other.replicates)


@lru_cache(maxsize=8)
def resamples(episodes: int, count: int = RESAMPLES) -> Float[Array, "count episodes"]:
    """How often each episode is drawn in each bootstrap resample: the same for all who share the number of episodes."""
    rng = np.random.default_rng(episodes)
    return rng.multinomial(episodes, np.full(episodes, 1 / episodes), size=count).astype(float)


def measure(scores: Scores, condition: str, name: str, *, bins: int = BINS) -> Estimate | None:
    """One metric of the table with its interval; None where it is undefined (no queries of its kind, or a rule without
    an unknown)."""
    if not _defined(scores, condition, name):
        return None
    metric = METRICS[condition, name](scores, bins)
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample of few episodes may draw no stranger at all
        replicates = np.array([metric(w) for w in resamples(scores.episodes)])
    return Estimate(metric(np.ones(scores.episodes)), replicates)


def value(scores: Scores, condition: str, name: str, *, bins: int = BINS) -> float | None:
    """One metric of the table without its interval, or None where it is undefined."""
    if not _defined(scores, condition, name):
        return None
    return METRICS[condition, name](scores, bins)(np.ones(scores.episodes))


def _defined(scores: Scores, condition: str, name: str) -> bool:
    if not scores.known.any() or (condition == "ood" and scores.known.all()):
        return False
    return name != "open_score" or bool(np.isfinite(scores.open_loss).all())
