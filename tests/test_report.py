import json
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from fewsure import persist
from fewsure.calibrate import calibrate
from fewsure.config import CalibrateConfig, EvaluateConfig, TrainConfig
from fewsure.errors import FewsureError
from fewsure.evaluate import evaluate
from fewsure.paper import published
from fewsure.report import differences, write_report
from fewsure.report.curves import pooled_bins
from fewsure.report.drawing import INK
from fewsure.report.parts import Entry
from fewsure.report.runs import group, read
from fewsure.report.surfaces import entropy
from fewsure.rules import OpenSet, Softmax
from fewsure.task import Prediction
from fewsure.train import train

SECTIONS = ("results", "tasks", "surfaces", "covariances", "reliability", "temperature", "frontier", "provenance")
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Every element of a page, with the section it is in; a wrongly nested page does not parse."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.stack: list[str] = []
        self.section = ""
        self.words: list[str] = []
        self.feed(self.text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self.section = dict(attrs).get("aria-labelledby") or ""
        self.elements.append((tag, dict(attrs), self.section))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), self.section))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def attributes(self, *names: str) -> list[str]:
        return [value or "" for _, attrs, _ in self.elements for name, value in attrs.items() if name in names]

    def count(self, section: str, *tags: str) -> int:
        return sum(tag in tags and where == section for tag, _, where in self.elements)


@pytest.fixture(scope="module")
def runs(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of folders of runs: two methods, one of them with two seeds."""
    root = tmp_path_factory.mktemp("study")
    shutil.copytree(tiny_run, root / "moons" / "ours" / "seed0")
    options = persist.read_config(tiny_run)["train"]
    trained = TrainConfig(**{**options, "method": "protosngp", "rank": None})
    folder = root / "moons" / "protosngp" / "seed0"
    train(trained, folder)
    calibrate(folder, CalibrateConfig(episodes=6))
    evaluate(folder, EvaluateConfig(episodes=4, stranger_episodes=1))
    other = shutil.copytree(folder, root / "moons" / "protosngp" / "seed1")
    results = persist.read_json(other / persist.RESULTS)
    for row in results["rows"]:
        row["seed"], row["value"] = 1, row["value"] + 0.5
    persist.write_json(other / persist.RESULTS, results)
    return root


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(write_report([runs], tmp_path_factory.mktemp("out")))


def test_report_loads_nothing(page: Page) -> None:
    loads = page.attributes("src", "href", "xlink:href", "srcset", "data", "poster", "action")
    assert loads
    assert all(load.startswith(("#", "data:")) for load in loads)
    assert not {"script", "iframe", "object", "embed", "base", "form"} & {tag for tag, _, _ in page.elements}
    assert "@import" not in page.text
    assert not any("url(" in part and not part.split("url(")[1].startswith("#") for part in page.attributes("style"))


def test_every_section_is_there_with_its_figures(page: Page) -> None:
    links = [attrs["href"] for tag, attrs, _ in page.elements if tag == "a"]
    assert links == [f"#{name}" for name in SECTIONS]
    assert {name: page.count(name, "svg") for name in SECTIONS} == {
        "results": 0,
        "tasks": 4,
        "surfaces": 2 * 3,  # methods by rules
        "covariances": 2,  # spectra
        "reliability": 2,
        "temperature": 2,
        "frontier": 2,
        "provenance": 2,  # training curves
    }
    # Heat maps of covariance and precision: of two classes, but one for all in protosngp; and the colour scale.
    assert page.count("covariances", "img") == 4 + 2 + 1
    assert page.count("results", "table") == 2


def test_ids_are_unique_and_references_resolve(page: Page) -> None:
    ids = Counter(page.attributes("id"))
    assert max(ids.values()) == 1
    references = {value[1:] for value in page.attributes("href", "xlink:href") if value.startswith("#")}
    references |= {value[5:-1] for value in page.attributes("clip-path") if value.startswith("url(#")}
    assert references <= ids.keys()
    assert any(name.startswith("f") for name in references)


def test_figures_take_the_text_colour_and_are_described(page: Page) -> None:
    assert "currentColor" in page.text
    assert INK not in page.text
    labels = [attrs.get("aria-label") for tag, attrs, _ in page.elements if tag == "svg"]
    assert labels
    assert all(labels)
    assert all("alt" in attrs for tag, attrs, _ in page.elements if tag == "img")


def test_our_value_stands_beside_the_papers(page: Page, tiny_run: Path) -> None:
    value, spread = published("moons", "protomahalanobis", 1, "id", "accuracy", way=2, shot=5) or (0, 0)
    assert f"({value:.2f} ±\u00a0{spread:.2f})" in page.words
    rows = persist.read_json(tiny_run / persist.RESULTS)["rows"]
    (ours,) = (r["value"] for r in rows if (r["rule"], r["condition"], r["metric"]) == ("softmax", "id", "accuracy"))
    assert any(word.startswith(f"{ours:.2f} ±") for word in page.words)


def test_verdict_on_pooling_is_computed_from_the_cells(page: Page, runs: Path) -> None:
    gaps = {"ece": [], "ece_episode": []}
    for method, rank, rule, folders in (
        ("protomahalanobis", 1, "logit-normal", ["ours/seed0"]),
        ("protosngp", None, "softmax", ["protosngp/seed0", "protosngp/seed1"]),
    ):
        rows = [row for f in folders for row in persist.read_json(runs / "moons" / f / persist.RESULTS)["rows"]]
        for condition in ("id", "ood"):
            paper, _ = published("moons", method, rank, condition, "ece", way=2, shot=5) or (0, 0)
            for metric, found in gaps.items():
                wanted = (rule, condition, metric)
                values = [r["value"] for r in rows if (r["rule"], r["condition"], r["metric"]) == wanted]
                found.append(abs(np.mean(values) - paper))
    pooled, episode = (np.mean(found) for found in gaps.values())
    assert f"Over the 4 cells with a published value, our mean absolute deviation from it is {pooled:.2f}" in page.text
    assert f"{pooled:.2f} points pooled and {episode:.2f} per episode" in page.text


def test_one_covariance_for_all_classes_is_told_from_one_a_class(page: Page) -> None:
    words = [word for word in page.words if word.strip()]
    at = words.index("one for all")
    assert words[at - 3 : at - 1] == ["protosngp", "0.000"]
    assert float(words[words.index("one a class") - 2]) > 0


def test_same_runs_give_the_same_bytes_however_they_are_named(page: Page, runs: Path, tmp_path: Path) -> None:
    folders = [path.parent for path in sorted(runs.rglob("results.json"), reverse=True)]
    again = write_report([*folders, runs / "moons"], tmp_path)
    assert again == tmp_path / "report.html"
    assert again.read_text() == page.text


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_folder_without_evaluated_run_is_refused(tmp_path: Path, name: str, tiny_run: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FewsureError, match=rf"{name}.*\(config\.json beside results\.json.*fewsure evaluate"):
        write_report([tiny_run, tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_twin_runs_are_refused(tiny_run: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(tiny_run, tmp_path / "twin")
    with pytest.raises(FewsureError, match="twin are both protomahalanobis rank 1 of seed 0"):
        write_report([tiny_run, twin], tmp_path)


def test_results_that_are_not_ours_are_refused(tiny_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(tiny_run, tmp_path / "run")
    (run / persist.RESULTS).write_text(json.dumps({"rows": []}))
    with pytest.raises(FewsureError, match="fewsure evaluate"):
        write_report([run], tmp_path)


def test_runs_not_evaluated_yet_are_named(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "runs" / "done")
    half = shutil.copytree(tiny_run, tmp_path / "runs" / "half")
    (half / persist.RESULTS).unlink()
    assert "half" in Page(write_report([tmp_path / "runs"], tmp_path)).text.split("runs left out")[1]


def test_names_from_files_are_text_not_markup(tiny_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(tiny_run, tmp_path / "runs" / '<img src="x" onerror="alert(1)">')
    results = persist.read_json(run / persist.RESULTS)
    results["about"]["revision"] = "$<b>&amp;"
    persist.write_json(run / persist.RESULTS, results)
    page = Page(write_report([run], tmp_path))
    assert "$<b>&amp;" in page.words
    assert page.attributes("onerror") == []


def test_a_failed_report_leaves_the_old_one(tiny_run: Path, tmp_path: Path) -> None:
    path = write_report([tiny_run], tmp_path)
    old = path.read_bytes()
    with pytest.raises(FewsureError, match="device"):
        write_report([tiny_run], tmp_path, device="abacus")
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_entropy_is_zero_when_certain_and_one_when_undecided() -> None:
    prediction = Prediction.of(torch.tensor([[[40.0, 0.0, 0.0], [1.0, 1.0, 1.0]]]))
    torch.testing.assert_close(entropy(prediction, Softmax()), torch.tensor([[0.0, 1.0]]))
    # Certain among the classes, and surely unknown: undecided between the classes.
    unknown = OpenSet(beta=1.0, a=1.0, b=-200.0)
    torch.testing.assert_close(entropy(prediction, unknown), torch.tensor([[1.0, 1.0]]))


def test_bins_are_pooled_by_their_counts() -> None:
    one = {"count": [1.0, 0.0, 0.0], "confidence": [0.2, None, None], "accuracy": [0.0, None, None]}
    two = {"count": [3.0, 2.0, 0.0], "confidence": [0.4, 0.6, None], "accuracy": [1.0, 0.5, None]}
    count, confidence, accuracy = pooled_bins([one, two])
    np.testing.assert_allclose(count, [4, 2, 0])
    np.testing.assert_allclose(confidence, [0.35, 0.6, np.nan])
    np.testing.assert_allclose(accuracy, [0.75, 0.5, np.nan])


def test_importing_the_report_imports_no_torch() -> None:
    code = "import sys, fewsure.report; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH = 390


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_page_fits_a_phone_in_a_real_browser(page: Page, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page.text)
    (tmp_path / "phone.html").write_text(
        f"""<iframe id="phone" src="report.html" style="width: {WIDTH}px; height: 800px; border: 0"></iframe>
        <pre id="told"></pre>
        <script>
        document.getElementById("phone").onload = function () {{
          const page = this.contentDocument;
          page.querySelectorAll("details").forEach(d => d.open = true);
          const images = [...page.images].map(i => i.naturalWidth);
          const drawings = [...page.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width);
          const first = page.querySelector("tbody th"), before = first.getBoundingClientRect().left;
          page.querySelector(".scroll").scrollLeft = 200;
          const told = {{
            width: page.documentElement.scrollWidth,
            image: Math.min(...images), drawing: Math.min(...drawings), widest: Math.max(...drawings),
            scrolled: page.querySelector(".scroll").scrollLeft, stuck: first.getBoundingClientRect().left - before,
          }};
          document.getElementById("told").textContent = JSON.stringify(told);
        }};
        </script>"""
    )
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000", "--dump-dom", (tmp_path / "phone.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout.split('<pre id="told">')[1].split("</pre>")[0])
    assert told["width"] == WIDTH  # the page itself never scrolls sideways ...
    assert told["scrolled"] == 200  # ... its tables do, within their own frames ...
    assert abs(told["stuck"]) <= 1  # ... and their first column stays
    assert told["image"] > 0
    assert told["drawing"] > 80
    assert told["widest"] <= WIDTH


def test_differences_are_paired_by_seed(tiny_run: Path, tmp_path: Path) -> None:
    told = persist.read_config(tiny_run)["train"]
    baseline = tmp_path / "baseline"
    train(TrainConfig(**{**told, "method": "protonet-sn", "rank": None}), baseline)
    calibrate(baseline, CalibrateConfig(episodes=6))
    evaluate(baseline, EvaluateConfig(episodes=4, stranger_episodes=1))
    ours, theirs = read(tiny_run), read(baseline)
    found = differences.section(group([ours, theirs]))
    assert found is not None
    ((name, seeds, accuracy, *_),) = found.parts[0].tables[0].rows
    assert (name, seeds) == ("protomahalanobis rank 1", "1")
    mine, its = (
        next(row["value"] for row in run.rows if (row["rule"], row["metric"]) == ("open-set", "accuracy"))
        for run in (ours, theirs)
    )
    assert isinstance(accuracy, Entry)
    assert accuracy.text.rstrip("*") == f"{mine - its:+.2f}"
    low, high = (float(end) for end in accuracy.beneath.strip("()").split(" to "))
    assert low <= mine - its <= high
    assert (accuracy.text.endswith("*")) == (low > 0 or high < 0)
    assert differences.section(group([ours])) is None
