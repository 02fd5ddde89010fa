"""The command line: each verb, what it costs to ask for help, and one clear line for every mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fewsure
from fewsure import persist, study
from fewsure.cli import VERBS, main, parser
from fewsure.config import CalibrateConfig, EvaluateConfig, TrainConfig

#: What a verb must be given, besides flags, for its parser to be content.
POSITIONALS = {"calibrate": ["nowhere"], "evaluate": ["nowhere"], "reproduce": ["toy"], "report": ["nowhere"]}
every_verb = pytest.mark.parametrize("verb", VERBS)
TINY_TRAINING = ["--train_tasks=8", "--tasks_per_step=4", "--validation_tasks=2"]


def run(*arguments: object) -> int:
    """The exit code, whichever way the command ends."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)


def assert_one_line(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fewsure")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for part in parts:
        assert part in err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default folders are below the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def tiny_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies run at once, in this process, on a few tasks, and write a page of one word for a report."""

    def at_once(runs, jobs: int, say) -> list:
        return [row for run in runs for row in run()]

    def write_report(runs: list[Path], out: str, *, seed: int, device: str) -> Path:
        (Path(out) / "report.html").write_text("report")
        return Path(out) / "report.html"

    monkeypatch.setattr(study, "run_all", at_once)
    monkeypatch.setattr(study, "CalibrateConfig", lambda **told: CalibrateConfig(**{**told, "episodes": 2}))
    tiny = {"episodes": 2, "stranger_episodes": 0}
    monkeypatch.setattr(study, "EvaluateConfig", lambda **told: EvaluateConfig(**{**told, **tiny}))
    monkeypatch.setattr("fewsure.report.write_report", write_report)


# asking


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["train", "--print_config"], *([verb, "--help"] for verb in VERBS)]
)
def test_asking_imports_no_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from fewsure.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code
heavy = {{"torch", "numpy", "sklearn", "matplotlib", "PIL"}} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "fewsure", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1]) == (0, fewsure.__version__)


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"    {verb}" in shown for verb in VERBS)
    assert "Exit codes" in shown


@every_verb
def test_every_verb_takes_seed_device_and_out(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"--{flag}" in shown for flag in ("seed", "device", "out", "config"))


def test_every_flag_of_training_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rank of the covariance factors" in shown
    assert "stop after so many validations without a better NLL" in shown


@every_verb
def test_a_printed_configuration_can_be_read_back(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(verb, *POSITIONALS.get(verb, []), "--seed=7", "--print_config") == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["seed"] == 7
    (tmp_path / "config.yaml").write_text(printed)
    told = parser().parse_args([verb, "--config", str(tmp_path / "config.yaml"), *POSITIONALS.get(verb, [])])
    again = parser().parse_args([verb, *POSITIONALS.get(verb, []), "--seed=7"])
    told[verb].pop("config")
    again[verb].pop("config")
    assert told[verb] == again[verb]


# each verb, end to end


def test_from_training_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run("train", "--dataset=moons", "--method=protonet-sn", *TINY_TRAINING, "--seed=3", "--out", folder) == 0
    assert run("calibrate", folder, "--episodes=2") == 0
    assert run("evaluate", folder, "--episodes=2", "--stranger_episodes=1") == 0
    assert run("report", folder, "--out", tmp_path / "report") == 0
    shown = capsys.readouterr().out
    assert f"next:    fewsure calibrate {folder}" in shown
    assert f"next: fewsure evaluate {folder}" in shown
    assert "moons, 1 seed (the paper's in brackets)" in shown
    assert f"results: {folder / 'results.json'}" in shown
    assert {path.name for path in folder.iterdir()} >= {
        *("config.json", "model.safetensors", "rules.json", "train.jsonl"),
        *("checkpoint.safetensors", "results.json", "frontier.json"),
    }
    assert persist.read_config(folder)["train"]["seed"] == 3
    assert list((tmp_path / "report").rglob("*.html"))


def test_each_step_may_write_to_a_folder_of_its_own(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    assert run("train", "--method=protonet", *TINY_TRAINING, "--out", a) == 0
    before = contents(a)
    assert run("calibrate", a, "--episodes=2", "--out", b) == 0
    assert run("evaluate", b, "--episodes=2", "--stranger_episodes=0", "--out", c) == 0
    assert contents(a) == before
    assert (c / "results.json").exists()
    assert not (b / "results.json").exists()


def test_a_run_has_a_default_folder_of_its_own(tmp_path: Path) -> None:
    assert run("train", "--rank=2", "--seed=4", *TINY_TRAINING) == 0
    assert (tmp_path / "here" / "runs" / "moons-protomahalanobis-2-seed4" / "model.safetensors").exists()


def test_flags_come_from_a_configuration_file_and_the_line_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("dataset: circles\nmethod: protonet\ntrain_tasks: 8\ntasks_per_step: 4\nseed: 5\n")
    assert run("train", "--config", file, "--validation_tasks=2", "--seed=6", "--out", tmp_path / "run") == 0
    expected = TrainConfig("circles", "protonet", train_tasks=8, tasks_per_step=4, validation_tasks=2, seed=6)
    assert persist.read_config(tmp_path / "run")["train"] == json.loads(json.dumps(expected.__dict__))


def test_a_configuration_may_be_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"method": "protonet", "train_tasks": 4, "tasks_per_step": 4, "validation_tasks": 2}))
    assert run("train", "--config", file, "--out", tmp_path / "run") == 0


@pytest.mark.usefixtures("tiny_study")
def test_a_study_is_reproduced_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choice = ["--datasets", "moons", "circles", "--methods", "protonet", "protomahalanobis", "--ranks", "0", "3"]
    assert run("reproduce", "toy", *choice, "--seeds=1", "--steps=2", "--out", tmp_path / "study") == 0
    rows = json.loads((tmp_path / "study" / "results.json").read_text())["rows"]
    assert {(row["dataset"], row["method"], row["rank"]) for row in rows} == {
        (dataset, method, rank)
        for dataset in ("moons", "circles")
        for method, rank in (("protonet", None), ("protomahalanobis", 0), ("protomahalanobis", 3))
    }
    shown = capsys.readouterr().out
    assert "6 runs" in shown
    assert f"report: {tmp_path / 'study' / 'report.html'}" in shown


@pytest.mark.usefixtures("tiny_study")
def test_the_demo_shows_every_toy_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def made_up(runs, jobs: int, say) -> list:
        asked.extend(runs)
        numbers = {"condition": "id", "metric": "accuracy", "rule": "softmax", "value": 9.0, "low": 8.0, "high": 9.5}
        numbers |= {"way": 2, "shot": 5}
        return [{**numbers, **run.train.__dict__} for run in runs]

    monkeypatch.setattr(study, "run_all", made_up)
    assert run("demo", "--steps=12", "--seed=3", "--out", tmp_path / "demo") == 0
    assert {(told.train.train_tasks // told.train.tasks_per_step, told.train.seed) for told in asked} == {(12, 3)}
    shown = capsys.readouterr().out
    assert all(f"{name}, 1 seed" in shown for name in ("moons", "circles", "gaussians"))
    assert shown.splitlines()[-1].startswith("report: ")


# mistakes


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["expected", "demo,train"]),
        (["trian"], ["invalid choice", "trian"]),
        (["train", "--rank=many"], ["--rank: expected int or null, got many"]),
        (["train", "--rank=1.5"], ["--rank", "1.5"]),
        (["train", "--learning_rate=fast"], ["--learning_rate", "float", "fast"]),
        (["train", "--schedule=linear"], ["--schedule", "cosine", "linear"]),
        (["train", "--rank"], ["--rank", "expected one argument"]),
        (["train", "--nonsense=1"], ["--nonsense"]),
        (["calibrate"], ["run"]),
        (["evaluate", "a", "b"], ["unrecognized", "b"]),
        (["reproduce", "omniglot"], ["omniglot", "toy"]),
        (["reproduce", "toy", "--ranks", "0", "few"], ["ranks", "few"]),
        (["train", "--method=protonets"], ["unknown method 'protonets'", "did you mean 'protonet'?"]),
        (["train", "--dataset=moon"], ["unknown dataset 'moon'", "did you mean 'moons'?"]),
        (["train", "--backbone=conv9"], ["unknown backbone 'conv9'"]),
        (["train", "--rank=-1"], ["rank -1 is negative: give 0"]),
        (["train", "--method=protonet", "--rank=2"], ["'protonet' has no rank, but was given 2: leave it out"]),
        (["train", "--device=abacus"], ["device 'abacus' cannot be used here", "try 'cpu'"]),
        (["train", "--train_way=3"], ["moons with 3 classes"]),
        (["train", "--train_tasks=0"], ["train_tasks is 0: expected a number above 0"]),
        (["train", "--patience=0"], ["patience is 0"]),
        (["calibrate", "nowhere"], ["nowhere/config.json", "is its folder a run folder of fewsure?"]),
        (["evaluate", "nowhere"], ["nowhere/config.json", "is its folder a run folder of fewsure?"]),
        (["report", "nowhere"], ["nowhere"]),
        (["reproduce", "toy", "--methods", "proto"], ["unknown method 'proto'"]),
        (["reproduce", "toy", "--datasets", "omniglot"], ["'omniglot'"]),
        (["reproduce", "toy", "--ranks", "-2"], ["rank -2 is negative"]),
        (["reproduce", "toy", "--seeds=0"], ["seeds is 0"]),
        (["reproduce", "toy", "--jobs=0"], ["jobs is 0"]),
        (["demo", "--steps=0"], ["steps is 0"]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert_one_line(capsys, *parts)
    assert list((tmp_path / "here").iterdir()) == []


@every_verb
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"nonsense: 1\n", ["nonsense"]),
        (b"seed: [1, 2\n", ["config"]),
        (b"seed: many\n", ["--seed", "int", "many"]),
        (b"just some words\n", ["config"]),
        (b"\xff\xfe\x00", ["config", "decode"]),
        (b"- 1\n- 2\n", ["config"]),
        (None, ["config", "does not exist"]),
    ],
)
def test_a_bad_configuration_file_is_one_line(
    verb: str, content: bytes | None, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_bytes(content)
    assert run(verb, "--config", file, *POSITIONALS.get(verb, [])) == 2
    assert_one_line(capsys, *parts)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_configuration_that_is_a_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--config", tmp_path) == 2
    assert_one_line(capsys, "--config", str(tmp_path))


UNWRITABLE = ["file/below", "file", *(place for place in ("/dev/full", "/proc/fewsure") if Path(place).parent.exists())]


@pytest.mark.parametrize("place", UNWRITABLE)
@every_verb
def test_an_out_that_cannot_be_written_is_one_line(
    verb: str, place: str, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    shutil.copytree(tiny_run, tmp_path / "run")
    before = contents(tmp_path)
    arguments = {
        "train": TINY_TRAINING,
        "calibrate": [tmp_path / "run", "--episodes=2"],
        "evaluate": [tmp_path / "run", "--episodes=2", "--stranger_episodes=0"],
        "reproduce": ["toy", "--steps=1", "--seeds=1"],
        "demo": ["--steps=1"],
        "report": [tmp_path / "run"],
    }[verb]
    assert run(verb, *arguments, "--out", tmp_path / place) == 2
    assert_one_line(capsys, "cannot write", str(tmp_path / place), "out")
    assert contents(tmp_path) == before


def test_an_interruption_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fewsure.train.train", interrupted)
    assert run("train", "--out", tmp_path / "run") == 130
    assert_one_line(capsys, "interrupted; the same command resumes it")


# nothing that a configuration says can make us import anything


@pytest.fixture
def sentinel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The name of a module on the path, and a way to ask whether anyone imported it."""
    folder = tmp_path / "on the path"
    folder.mkdir()
    touched = folder / "imported"
    (folder / "sentinel_module.py").write_text(
        f"open({str(touched)!r}, 'w').close()\n\n\nclass Thing:\n    def __init__(self, **told): pass\n"
    )
    monkeypatch.syspath_prepend(folder)
    yield touched
    assert not touched.exists()
    assert "sentinel_module" not in sys.modules


THING = {"class_path": "sentinel_module.Thing", "init_args": {"told": 1}}


def dests(verb: str) -> list[str]:
    told = parser().parse_args([verb, *POSITIONALS.get(verb, [])])[verb]
    return [name for name in vars(told) if name != "config"]


def test_the_sentinel_would_tell(tmp_path: Path, sentinel: Path) -> None:
    __import__("sentinel_module")
    assert sentinel.exists()
    sentinel.unlink()
    del sys.modules["sentinel_module"]


@every_verb
def test_no_class_path_in_a_configuration_is_imported(
    verb: str, sentinel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    named = "sentinel_module.Thing"
    bad = [
        THING,
        {"class_path": named},
        {"init_args": {"seed": 1}},
        {verb: THING},
        *({name: THING} for name in dests(verb)),
        *({name: {"class_path": named}} for name in dests(verb)),
        *({name: [THING]} for name in dests(verb)),
    ]
    texts = [yaml.safe_dump(content) for content in bad]
    texts += [f"{name}: !!python/name:{named}\n" for name in dests(verb)]
    texts += [f"{name}: !!python/object/apply:{named} []\n" for name in dests(verb)]
    for text in texts:
        file.write_text(text)
        assert run(verb, "--config", file, *POSITIONALS.get(verb, [])) == 2, text
        assert_one_line(capsys)
        assert not sentinel.exists(), text


@every_verb
def test_no_class_path_on_the_line_is_imported(verb: str, sentinel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--class_path=sentinel_module.Thing", "--init_args.told=1"]
    for name in dests(verb):
        flags += [f"--{name}.class_path=sentinel_module.Thing", f"--{name}.init_args.told=1"]
        flags += [f'--{name}={{"class_path": "sentinel_module.Thing"}}'] if name in ("seed", "steps", "rank") else []
    for flag in flags:
        assert run(verb, *POSITIONALS.get(verb, []), flag) == 2, flag
        assert_one_line(capsys)
        assert not sentinel.exists(), flag


@pytest.mark.parametrize("field", ["dataset", "method", "backbone"])
def test_a_name_is_looked_up_in_a_table_and_nowhere_else(
    field: str, sentinel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sentinel_module.Thing", "sentinel_module:Thing", "sentinel_module"):
        assert run("train", f"--{field}={name}") == 2
        assert_one_line(capsys, f"unknown {field} '{name}'")
        assert not sentinel.exists()
