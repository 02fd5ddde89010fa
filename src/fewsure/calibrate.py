"""Fit every rule of the study on calibration tasks, and keep what was fitted, on what, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fewsure import persist
from fewsure.config import CalibrateConfig
from fewsure.data import source as build_source
from fewsure.episodes import Source, generator
from fewsure.errors import FewsureError, unknown_name
from fewsure.metrics import expected_calibration_error
from fewsure.paper import id_ece
from fewsure.predicting import predict_all
from fewsure.rules import LogitNormal, OpenSet, Rule, Softmax, build_rule, fold_unknown
from fewsure.rules.logitnormal import thinned
from fewsure.rules.rule import only
from fewsure.task import Prediction
from fewsure.train import check_device, check_positive

CURVE = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 40.0, 80.0)  # temperatures at which the choice of T is shown
PRIORS = [0.2 * (0.005 / 0.2) ** (i / 19) for i in range(20)]  # log-spaced, 0.2 to 0.005


@dataclass(frozen=True)
class FittedRule:
    """A rule with its provenance. `setting` names how it was fitted; each rule has one headline setting."""

    rule: Rule
    setting: str
    headline: bool
    fitted_on: str | None  # the kind of strangers it saw, if any
    way: int
    shot: int
    report: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rule": self.rule.name, "params": self.rule.params()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> FittedRule:
        content = dict(content)
        return cls(rule=build_rule(content.pop("rule"), **content.pop("params")), **content)


def calibrate(folder: str | Path, config: CalibrateConfig, *, out: str | Path | None = None) -> list[FittedRule]:
    """Calibrate the run in `folder`, and leave its rules there or, with the model, in another folder."""
    device = check_device(config.device)
    check_positive(config, "episodes", "pi", "ece_budget", "temperature_cap")
    if config.pi >= 1:
        raise FewsureError(f"pi is {config.pi}: expected a number between 0 and 1")
    train = persist.read_run(folder)["train"]
    method = persist.load(folder)
    source = build_source(train["dataset"], split="calibrate", way=config.way, shot=config.shot)
    target = persist.target_folder(folder, out, persist.CONFIG, persist.MODEL, persist.LOG)
    draw = generator(config.seed, source.name, source.split)
    episodes = source.draw(config.episodes, draw, strangers=source.calibration_strangers)
    parts = list(predict_all(method, source, episodes, device=device))
    prediction, labels = Prediction.cat([p for p, _ in parts]), torch.cat([y for _, y in parts])
    fitted = fit_rules(prediction, labels, source, config)
    content = {
        "model": persist.fingerprint(target / persist.MODEL),
        "calibrate": asdict(config),
        "curve": temperature_curve(prediction, labels),
        "rules": [entry.to_json() for entry in fitted],
    }
    persist.write_json(target / persist.RULES, content)
    return fitted


def fit_rules(
    prediction: Prediction, labels: Int[Tensor, "e q"], source: Source, config: CalibrateConfig
) -> list[FittedRule]:
    """Every setting of every rule that this prediction has the quantities for."""
    fitted: list[FittedRule] = []

    def add(rule: Rule, setting: str, *, headline: bool = False, strangers: bool = False, **report: Any) -> None:
        fitted_on = source.calibration_strangers if strangers else None
        fitted.append(FittedRule(rule, setting, headline, fitted_on, source.way, source.shot, report))

    add(Softmax.fit(prediction, labels), "converged", headline=True)
    add(Softmax.fit(prediction, labels, how="paper"), "paper")
    if prediction.energy is not None:
        target = (
            config.target_ece
            if config.target_ece is not None
            else id_ece(source.name, way=source.way, shot=source.shot)
        )
        for scale in ("std", "var"):
            cap = config.temperature_cap
            found = LogitNormal.fit(prediction, labels, how="search", cap=cap, scale=scale)
            # The search may have ended for want of room: said, never hidden.
            ran_out = found.temperature >= cap and not found.no_worse_than_softmax(*thinned(prediction, labels))
            add(found, f"search-{scale}", headline=scale == "std", cap=cap, reached_cap=ran_out)
        add(LogitNormal(), "T=1")
        if target is not None:
            add(LogitNormal.fit(prediction, labels, how="ece", target_ece=target), "paper-ece", target_ece=target)
        add(LogitNormal.fit(prediction, labels, how="strangers"), "strangers", strangers=True)
    openset = OpenSet.fit(prediction, labels, pi=config.pi)
    add(openset, "prior", headline=True, strangers=True)
    within, met = _within_budget(openset, prediction, labels, config.ece_budget)
    add(within, "ece-budget", strangers=True, ece_budget=config.ece_budget, met=met)
    return fitted


def _within_budget(
    rule: OpenSet, prediction: Prediction, labels: Int[Tensor, "e q"], budget: float
) -> tuple[OpenSet, bool]:
    """The largest pi of the list whose validation ID ECE is within the budget, or the smallest pi of all; and which."""
    known = labels >= 0
    held = only(prediction, known)
    for pi in PRIORS:
        candidate = replace(rule, pi=pi)
        confidence, guess = fold_unknown(candidate(held))[0].exp().max(-1)
        if expected_calibration_error(confidence.numpy(), (guess == labels[known]).numpy()) <= budget:
            return candidate, True
    return replace(rule, pi=PRIORS[-1]), False


def temperature_curve(prediction: Prediction, labels: Int[Tensor, "e q"]) -> list[dict[str, float]]:
    """How NLL and ID ECE on the calibration tasks move with T: what the paper's search sees."""
    if prediction.energy is None:
        return []
    prediction, labels = thinned(prediction, labels)  # as the search has it
    deterministic = -Softmax()(prediction)[..., :-1][labels >= 0].gather(-1, labels[labels >= 0].unsqueeze(-1)).mean()
    rows = []
    for temperature in CURVE:
        rule = LogitNormal(temperature)
        nll, ece = rule.id_nll(prediction, labels), rule.id_ece(prediction, labels)
        rows.append({"T": temperature, "nll": nll, "ece": ece, "deterministic_nll": deterministic.item()})
    return rows


def read_rules(folder: str | Path) -> list[FittedRule]:
    """The fitted rules of a run folder, which must be those of its model."""
    path = Path(folder) / persist.RULES
    if not path.exists():
        raise FewsureError(f"{folder} has no {persist.RULES}: run `fewsure calibrate {folder}` first")
    content = persist.read_json(path)
    try:
        fitted, model = [FittedRule.from_json(entry) for entry in content["rules"]], content["model"]
    except (KeyError, TypeError) as error:
        raise FewsureError(f"{path} does not hold fitted rules ({error!r}): calibrate the run again") from error
    if model != persist.fingerprint(Path(folder) / persist.MODEL):
        raise FewsureError(f"{path} was fitted on another model than the one beside it: calibrate the run again")
    return fitted


def load_rule(folder: str | Path, name: str = "open-set") -> Rule:
    """The rule of a calibrated run folder, by name, at its headline setting."""
    for fitted in read_rules(folder):
        if fitted.rule.name == name and fitted.headline:
            return fitted.rule
    raise unknown_name(f"rule in {folder}", name, [f.rule.name for f in read_rules(folder) if f.headline])
