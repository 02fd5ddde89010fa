"""Measure a run: predictions to scores, scores to result rows, a frontier and reliability tables.

Episodes are drawn on the CPU from a seed that does not know the method, so that all methods see the same ones.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

import fewsure
from fewsure import persist
from fewsure.calibrate import CURVE, PRIORS, FittedRule, read_rules
from fewsure.config import EvaluateConfig
from fewsure.data import source as build_source
from fewsure.episodes import generator
from fewsure.errors import FewsureError
from fewsure.metrics import METRICS, OF_PREDICTION, Estimate, Scores, measure, reliability, value
from fewsure.predicting import predict_all
from fewsure.rules import LogitNormal, OpenSet, Rule, Softmax, fold_unknown
from fewsure.rules.rule import draw_some
from fewsure.task import Prediction
from fewsure.train import check_device, check_positive

REPLICATES = "replicates.safetensors"
FRONTIER_QUERIES = 200  # at most, of each episode's known queries and of its strangers: the frontier asks many rules
EVEN_ODDS = 0.5


def score(prediction: Prediction, labels: Int[Tensor, "e q"], rule: Rule, first_episode: int = 0) -> Scores:
    """One row a query. The label that a rule answers is the one its logits give, and its confidence counts the unknown
    mass spread evenly. Labels of strangers are uniform in the paper's tables: here they are so in expectation, not
    drawn, so that an answer is right by 1/N."""
    log_probs = rule(prediction)
    folded = fold_unknown(log_probs)
    known = labels >= 0
    truth = torch.full_like(folded, 1 / prediction.way)
    truth[known] = torch.nn.functional.one_hot(labels[known], prediction.way).to(truth)
    guess = prediction.logits.argmax(-1, keepdim=True)
    probs = folded.exp()
    at_even_odds = rule.at_prior(EVEN_ODDS)
    even = log_probs if at_even_odds == rule else at_even_odds(prediction)
    of_label = even.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    episode = torch.arange(len(labels)).unsqueeze(-1).expand_as(labels) + first_episode
    columns = (
        episode,
        known,
        probs.gather(-1, guess).squeeze(-1).double(),
        truth.gather(-1, guess).squeeze(-1).double(),
        torch.where(truth > 0, -truth * folded, 0).sum(-1).double(),
        (probs.square().sum(-1) - 2 * (probs * truth).sum(-1) + 1).double(),
        prediction.strangeness.double(),
        -torch.where(known, of_label, even[..., -1]).double(),
    )
    return Scores(*(column.flatten().numpy() for column in columns))


def evaluate(folder: str | Path, config: EvaluateConfig, *, out: str | Path | None = None) -> list[dict[str, Any]]:
    """Evaluate the calibrated run in `folder`; write results, frontier and replicates there or to another folder."""
    device = check_device(config.device)
    check_positive(config, "episodes", "bins")
    if config.stranger_episodes < 0:
        raise FewsureError(f"stranger_episodes is {config.stranger_episodes}: expected 0 or more")
    run = persist.read_run(folder)
    method, rules = persist.load(folder), read_rules(folder)
    calibrated = persist.read_json(Path(folder) / persist.RULES)
    source = build_source(run["train"]["dataset"], split="test", way=config.way, shot=config.shot)
    for fitted in rules:
        if (fitted.way, fitted.shot) != (source.way, source.shot):
            raise FewsureError(
                f"the rules of {folder} were fitted at {fitted.way}-way {fitted.shot}-shot, and a rule belongs to its "
                f"way and shot: calibrate at {source.way}-way {source.shot}-shot, with --out to keep the others"
            )
    target = persist.target_folder(folder, out, persist.CONFIG, persist.MODEL, persist.LOG, persist.RULES)
    draw = generator(config.seed, source.name, source.split)
    shown = min(config.stranger_episodes, config.episodes)
    batches = [
        source.draw(count, draw, strangers)
        for count, strangers in ((shown, source.test_strangers), (config.episodes - shown, None))
        if count
    ]
    predictions = list(predict_all(method, source, *batches, device=device))

    describe = {
        **_columns(run),
        "split": source.split,
        "way": source.way,
        "shot": source.shot,
        "seed": run["train"]["seed"],
    }
    rows, replicates, tables = [], {}, []
    shared: dict[tuple[str, str], Estimate | None] = {}  # what does not depend on the rule is measured once
    for fitted in (rule for rule in rules if rule.headline):
        scores = _score_all(predictions, fitted.rule)
        tables.append(_reliability(fitted, scores, config.bins))
        for condition, name in METRICS:
            estimate = shared.get((condition, name)) or measure(scores, condition, name, bins=config.bins)
            if name in OF_PREDICTION:
                shared[condition, name] = estimate
            if estimate is not None:
                row = _row(describe, fitted, condition, name, estimate, source.test_strangers, config)
                rows.append(row)
                replicates[f"{fitted.rule.name}/{condition}/{name}"] = torch.tensor(estimate.replicates)
    points = _frontier(predictions, rules, config)
    told = {"train": run["train"], "calibrate": calibrated["calibrate"], "evaluate": asdict(config)}
    made_of = {"model": run["model"], "rules": persist.fingerprint(Path(folder) / persist.RULES)}
    about = {**provenance(device), **told, **made_of}
    persist.write_json(target / persist.FRONTIER, {"about": about, "run": describe, "points": points})
    persist.write_tensors(target / REPLICATES, replicates)
    persist.write_json(target / persist.RESULTS, {"about": about, "rows": rows, "reliability": tables})
    return rows


def _score_all(predictions: Sequence[tuple[Prediction, Tensor]], rule: Rule, keep: int | None = None) -> Scores:
    """Scores of all episodes, of at most `keep` queries of a kind in each."""
    parts, first = [], 0
    for prediction, labels in predictions:
        if keep is not None:
            prediction, labels = _thinned(prediction, labels, keep)
        parts.append(score(prediction, labels, rule, first))
        first += len(labels)
    return Scores.merge(parts)


def _thinned(prediction: Prediction, labels: Int[Tensor, "e q"], keep: int) -> tuple[Prediction, Tensor]:
    """At most so many known queries and strangers of each episode, drawn evenly."""
    kinds = (labels[0] >= 0, labels[0] < 0)
    index = torch.cat([draw_some(kind.nonzero().squeeze(-1), keep) for kind in kinds])
    return prediction.map(lambda t: t[:, index]), labels[:, index]


def _frontier(
    predictions: Sequence[tuple[Prediction, Tensor]], rules: Sequence[FittedRule], config: EvaluateConfig
) -> list[dict[str, Any]]:
    """ID NLL and ID ECE against OOD ECE, for every fitted setting and along each rule's own parameter."""
    openset = next((f for f in rules if isinstance(f.rule, OpenSet) and f.headline), None)
    candidates = [(f.rule, f.setting, f.fitted_on) for f in rules]
    if predictions[0][0].energy is not None:
        candidates += [(LogitNormal(t), "curve", None) for t in CURVE]
    if openset is not None:
        candidates += [(openset.rule.at_prior(pi), "curve", openset.fitted_on) for pi in PRIORS[::2]]
    candidates.append((Softmax(), "T=1", None))
    points = []
    for rule, setting, fitted_on in candidates:
        scores = _score_all(predictions, rule, FRONTIER_QUERIES)
        point = {"rule": rule.name, "setting": setting, "rule_params": rule.params(), "fitted_on": fitted_on}
        for condition, name in (
            ("id", "nll"),
            ("id", "ece"),
            ("id", "ece_episode"),
            ("ood", "ece"),
            ("ood", "open_score"),
        ):
            point[f"{condition}_{name}"] = value(scores, condition, name, bins=config.bins)
        points.append(point)
    return points


def _columns(run: dict[str, Any]) -> dict[str, Any]:
    train, model = run["train"], run["model"]
    return {
        "dataset": train["dataset"],
        "backbone": model["backbone"],
        "method": model["method"],
        "rank": model["rank"],
        "options": model["options"],
        **{key: train[key] for key in ("train_way", "train_shot", "train_tasks", "pool")},
    }


def _row(
    describe: dict[str, Any],
    fitted: FittedRule,
    condition: str,
    name: str,
    estimate: Estimate,
    strangers: str,
    config: EvaluateConfig,
) -> dict[str, Any]:
    return {
        **describe,
        "rule": fitted.rule.name,
        "rule_params": fitted.rule.params(),
        "fitted_on": fitted.fitted_on,
        "condition": condition,
        "strangers": strangers if condition == "ood" else None,
        "level": None,
        "metric": name,
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "episodes": config.episodes if condition == "id" else min(config.stranger_episodes, config.episodes),
    }


def _reliability(fitted: FittedRule, scores: Scores, bins: int) -> dict[str, Any]:
    table: dict[str, Any] = {"rule": fitted.rule.name}
    for condition, rows in (("id", scores.known), ("ood", ~scores.known)):
        if rows.any():
            columns = zip(("count", "confidence", "accuracy"), reliability(scores, rows, bins), strict=True)
            table[condition] = {k: [None if np.isnan(x) else float(x) for x in v] for k, v in columns}
    return table


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, device, threads and code revision: what a figure depends on besides its seed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "fewsure": fewsure.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "revision": _revision(),
    }


def _revision() -> str | None:
    """The commit of the code, marked when the tree differs from it; None outside a checkout of ours."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed: a repository further up would be somebody else's
        return None
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
