"""Paired differences: every method less one of them, by one rule, on the same test tasks."""

from __future__ import annotations

from collections.abc import Sequence

from fewsure import persist
from fewsure.evaluate import REPLICATES
from fewsure.metrics import Estimate
from fewsure.report.parts import Entry, Part, Section, Table
from fewsure.report.runs import EvaluatedRun, Group, Model
from fewsure.tables import label, over_seeds

BASELINE: Model = ("protonet-sn", None)
RULE = "open-set"  # one rule for all: what is left is the embedding's and the covariance's
#: Heading, condition, metric, digits.
COLUMNS = (
    ("accuracy", "id", "accuracy", 2),
    ("NLL", "id", "nll", 3),
    ("ID ECE", "id", "ece", 2),
    ("OOD ECE", "ood", "ece", 1),
    ("AUROC", "ood", "auroc", 3),
    ("OpenAUC", "ood", "openauc", 3),
    ("open score", "ood", "open_score", 3),
)


def section(groups: Sequence[Group]) -> Section | None:
    """Differences to Protonet-SN, or None where it was not run or is alone."""
    parts = [
        Part(group.title, tables=[_table(group)])
        for group in groups
        if BASELINE in group.models and len(group.models) > 1
    ]
    lead = (
        f"Each method less {label(*BASELINE)}, both by the {RULE} rule and on the same test tasks, seed by seed: does "
        "the covariance earn its place? In brackets a 95 % interval of the paired difference: Student's t over seeds, "
        "or, of a single seed, a bootstrap over its tasks that resamples both alike. An asterisk marks intervals "
        "without zero.",
    )
    return Section("differences", "Paired differences", lead, parts) if parts else None


def _table(group: Group) -> Table:
    baseline = {run.seed: run for run in group.models[BASELINE]}
    rows = []
    for model, runs in group.models.items():
        paired = [(run, baseline[run.seed]) for run in runs if run.seed in baseline]
        if model != BASELINE and paired:
            entries = [_entry(paired, condition, metric, digits) for _, condition, metric, digits in COLUMNS]
            rows.append([label(*model), str(len(paired)), *entries])
    return Table(
        f"{group.title}: difference to {label(*BASELINE)}", ["method", "seeds", *(c[0] for c in COLUMNS)], rows
    )


def _entry(paired: Sequence[tuple[EvaluatedRun, EvaluatedRun]], condition: str, metric: str, digits: int) -> Entry:
    found = [(_estimate(ours, condition, metric), _estimate(theirs, condition, metric)) for ours, theirs in paired]
    differences = [ours - theirs for ours, theirs in found if ours is not None and theirs is not None]
    if not differences:
        return Entry("–")
    if len(differences) == 1:
        mean, low, high = differences[0].value, differences[0].low, differences[0].high
    else:
        mean, low, high = over_seeds([difference.value for difference in differences])
    star = "*" if low > 0 or high < 0 else ""
    return Entry(f"{mean:+.{digits}f}{star}", f"({low:+.{digits}f} to {high:+.{digits}f})")


def _estimate(run: EvaluatedRun, condition: str, metric: str) -> Estimate | None:
    wanted = {"rule": RULE, "condition": condition, "metric": metric}
    for row in run.rows:
        if all(row[key] == value for key, value in wanted.items()):
            tensors, _ = persist.read_tensors(run.folder / REPLICATES)
            return Estimate(row["value"], tensors[f"{RULE}/{condition}/{metric}"].numpy())
    return None
