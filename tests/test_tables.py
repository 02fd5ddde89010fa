"""Result rows to tables, beside the published values."""

import statistics

import pytest
from scipy import stats

from fewsure.data import DATASETS
from fewsure.methods import METHODS
from fewsure.paper import id_ece, published, toy_table
from fewsure.report.terminal import print_table
from fewsure.tables import COLUMNS, cell, label, markdown, models, paper_rule


def row(value: float = 90.0, **changes: object) -> dict:
    base = {"dataset": "moons", "method": "protonet", "rank": None, "rule": "softmax", "seed": 0}
    base |= {"way": 2, "shot": 5}
    base |= {"condition": "id", "metric": "accuracy", "value": value, "low": value - 1, "high": value + 3}
    return {**base, **changes}


def of_moons(rows: list[dict], metric: str = "accuracy", rule: str = "paper", condition: str = "id"):
    return cell(rows, "moons", ("protonet", None), rule, condition, metric)


def test_one_seed_shows_its_interval_over_episodes() -> None:
    found = of_moons([row(90.0)])
    assert (found.value, found.low, found.high, found.seeds) == (90.0, 89.0, 93.0, 1)
    assert found.paper == (97.02, 1.6)
    assert found.text(2) == "90.00 ± 2.00 (97.02 ± 1.60)"


@pytest.mark.parametrize("seeds", [2, 3, 5, 11])
def test_several_seeds_show_students_interval_over_seeds(seeds: int) -> None:
    values = [90.0 + seed**1.5 for seed in range(seeds)]
    found = of_moons([row(value, seed=seed) for seed, value in enumerate(values)])
    low, high = stats.t.interval(0.95, seeds - 1, statistics.fmean(values), stats.sem(values))
    assert found.value == pytest.approx(statistics.fmean(values))
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-3), pytest.approx(high, rel=1e-3))
    assert found.seeds == seeds


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": "circles"},
        {"method": "protoddu"},
        {"rank": 1},
        {"rule": "open-set"},
        {"condition": "ood"},
        {"metric": "nll"},
    ],
)
def test_a_cell_counts_its_own_rows_only(change: dict) -> None:
    assert of_moons([row(90.0), row(10.0, **change)]).value == 90.0
    assert of_moons([row(10.0, **change)]) is None


def test_the_papers_rule_is_softmax_for_baselines_and_logit_normal_for_ours() -> None:
    rules = {name: paper_rule(name) for name in METHODS}
    assert rules.pop("protomahalanobis") == "logit-normal"
    assert set(rules.values()) == {"softmax"}


def test_published_values_stand_beside_the_papers_own_rule_only() -> None:
    assert of_moons([row(rule="open-set")], rule="open-set").paper is None
    # The paper does not say how it pools: its ECE stands beside both.
    for metric in ("ece", "ece_episode"):
        assert of_moons([row(2.0, metric=metric)], metric).paper == (2.21, 1.4)
    assert of_moons([row(0.2, metric="brier")], "brier").paper is None


def test_every_published_row_is_of_a_method_and_dataset_of_ours() -> None:
    table = toy_table()
    assert set(DATASETS) == table.keys() - {"source"}
    assert "ICLR 2022" in table["source"]
    for dataset in DATASETS:
        assert len(table[dataset]["rows"]) == 12
        protocol = {key: table[dataset][key] for key in ("way", "shot")}
        for entry in table[dataset]["rows"]:
            assert entry["method"] in METHODS
            for key in entry.keys() - {"method", "rank"}:
                condition, metric = key.split("/")
                value, spread = published(dataset, entry["method"], entry["rank"], condition, metric, **protocol)
                assert spread >= 0
                assert 0 <= value <= (1 if metric in ("nll", "auroc", "aupr") else 100)


def test_what_the_paper_did_not_print_is_none() -> None:
    assert published("moons", "protomahalanobis", 3, "id", "accuracy", way=2, shot=5) is None
    assert published("omniglot", "protonet", None, "id", "accuracy", way=2, shot=5) is None
    assert published("moons", "protonet", None, "id", "brier", way=2, shot=5) is None
    for way, shot in ((1, 5), (2, 1)):
        assert published("moons", "protonet", None, "id", "accuracy", way=way, shot=shot) is None
    assert id_ece("moons", way=2, shot=5) == 4.69
    assert id_ece("omniglot", way=2, shot=5) is None


def test_methods_are_named_with_their_rank() -> None:
    assert [label("a", None), label("a", 0), label("a", 4)] == ["a", "a diag", "a rank 4"]
    rows = [row(method="b", rank=2), row(), row(method="b", rank=2, seed=1)]
    assert models(rows) == [("b", 2), ("protonet", None)]


def test_markdown_has_a_line_a_model_and_a_cell_a_column() -> None:
    lines = markdown([row(), row(method="protosngp"), row(dataset="circles", method="protoddu")], "moons").splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 2}
    assert lines[2].startswith("| protonet | 90.00 ± 2.00 (97.02 ± 1.60) |")
    assert lines[3].startswith("| protosngp | 90.00")


def test_the_terminal_shows_every_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        [row(), row(91.0, seed=1), row(80.0, dataset="circles", method="protomahalanobis", rank=0, rule="logit-normal")]
    )
    shown = capsys.readouterr().out
    assert "moons, 2 seeds" in shown
    assert "circles, 1 seed " in shown
    assert "protomahalanobis diag" in shown
    assert "90.50 ± 6.35" in shown
