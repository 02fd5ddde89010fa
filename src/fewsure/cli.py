"""The command line: one verb a step. Parsing imports no torch; a verb imports what it needs when it runs.

A configuration names entries of our tables. All flags are plain values, so nothing that a configuration says can make
the parser import anything.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from fewsure import __version__
from fewsure.config import CalibrateConfig, EvaluateConfig, ReproduceConfig, TrainConfig
from fewsure.errors import FewsureError

EPILOG = (
    "Exit codes: 0 done; 2 a mistake in what was asked, named in one line; 130 interrupted (start again to resume)."
)


def _train(told: Namespace) -> None:
    from fewsure.train import train

    config = TrainConfig(**_fields(told))
    default = "-".join(str(part) for part in (config.dataset, config.method, config.rank) if part is not None)
    folder = Path(told.out or f"runs/{default}-seed{config.seed}")
    train(config, folder)
    print(f"trained: {folder}\nnext:    fewsure calibrate {folder}")


def _calibrate(told: Namespace) -> None:
    from fewsure.calibrate import calibrate

    fitted = calibrate(told.run, CalibrateConfig(**_fields(told)), out=told.out)
    for entry in fitted:
        note = " (stopped at the cap)" if entry.report.get("reached_cap") else ""
        print(f"{entry.rule.name:13} {entry.setting:12} {entry.rule}{note}")
    print(f"next: fewsure evaluate {told.out or told.run}")


def _evaluate(told: Namespace) -> None:
    from fewsure.evaluate import evaluate
    from fewsure.report.terminal import print_table

    rows = evaluate(told.run, EvaluateConfig(**_fields(told)), out=told.out)
    print_table(rows)
    print(f"results: {Path(told.out or told.run) / 'results.json'}")


def _reproduce(told: Namespace) -> None:
    config = ReproduceConfig(**_fields(told))
    _study(config, told.out)


def _demo(told: Namespace) -> None:
    config = ReproduceConfig(
        methods=("protonet-sn", "protosngp", "protomahalanobis"),
        ranks=(4,),
        seeds=1,
        steps=told.steps,
        episodes=50,
        stranger_episodes=10,
        seed=told.seed,
        device=told.device,
        jobs=max(1, min(4, os.cpu_count() or 1)),
    )
    _study(config, told.out)


def _study(config: ReproduceConfig, out: str) -> None:
    from fewsure import persist
    from fewsure.evaluate import provenance
    from fewsure.report import write_report
    from fewsure.report.terminal import print_table
    from fewsure.study import run_all, toy_runs
    from fewsure.train import check_device, progress_bar

    runs = toy_runs(config, out)
    persist.writable_folder(out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no worker outlives us
    print(f"{len(runs)} runs, {config.jobs} at a time, into {out}; what is done already is kept", flush=True)
    with progress_bar(sys.stderr.isatty()) as bar:
        shown = bar.add_task("runs", total=len(runs))

        def say(line: str) -> None:
            bar.advance(shown)
            print(line, flush=True)

        rows = run_all(runs, config.jobs, say)
    about = {**provenance(check_device(config.device)), "study": asdict(config)}
    persist.write_rows(Path(out) / persist.RESULTS, about, rows)
    path = write_report([run.folder for run in runs], out, seed=config.seed, device=config.device)
    print_table(rows)
    print(f"report: {path}")


def _report(told: Namespace) -> None:
    from fewsure.report import write_report

    print(f"report: {write_report([Path(run) for run in told.runs], told.out, seed=told.seed, device=told.device)}")


def _common(verb: ArgumentParser, out: str | None, what: str = "folder to write to") -> None:
    verb.add_argument("--out", default=out, type=str | None if out is None else str, help=what)


def _seed_and_device(verb: ArgumentParser) -> None:
    verb.add_argument("--seed", type=int, default=0, help="seed of what is drawn")
    verb.add_argument("--device", type=str, default="cpu", help="cpu, cuda or another torch device")


def _add_train(verb: ArgumentParser) -> None:
    verb.add_class_arguments(TrainConfig)
    _common(verb, None, "run folder (default: runs/DATASET-METHOD-...); one that holds this run is resumed")


def _add_calibrate(verb: ArgumentParser) -> None:
    verb.add_argument("run", type=str, help="run folder")
    verb.add_class_arguments(CalibrateConfig)
    _common(verb, None, "folder to write to (default: the run folder)")


def _add_evaluate(verb: ArgumentParser) -> None:
    verb.add_argument("run", type=str, help="calibrated run folder")
    verb.add_class_arguments(EvaluateConfig)
    _common(verb, None, "folder to write to (default: the run folder)")


def _add_reproduce(verb: ArgumentParser) -> None:
    verb.add_argument("study", choices=["toy"], help="which study")
    for name, field in ReproduceConfig.__dataclass_fields__.items():
        if isinstance(field.default, tuple):
            kind = type(field.default[0])
            verb.add_argument(f"--{name}", type=kind, nargs="+", default=list(field.default), help=f"which {name}")
    _scalars(verb, ReproduceConfig)
    _common(verb, "results/toy")


def _scalars(verb: ArgumentParser, config: type) -> None:
    skip = {name for name, field in config.__dataclass_fields__.items() if isinstance(field.default, tuple)}
    verb.add_class_arguments(config, skip=skip)


def _add_demo(verb: ArgumentParser) -> None:
    verb.add_argument("--steps", type=int, default=1_000, help="optimiser steps of each run")
    _seed_and_device(verb)
    _common(verb, "runs/demo")


def _add_report(verb: ArgumentParser) -> None:
    verb.add_argument("runs", type=str, nargs="+", help="run folders, or folders of run folders")
    _seed_and_device(verb)
    _common(verb, "runs/report")


VERBS: dict[str, tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], None]]] = {
    "demo": ("meta-train on the toy tasks for a few minutes and write the report", _add_demo, _demo),
    "train": ("meta-train one method into a run folder", _add_train, _train),
    "calibrate": ("fit every rule of a trained run", _add_calibrate, _calibrate),
    "evaluate": ("measure a calibrated run on test tasks", _add_evaluate, _evaluate),
    "reproduce": ("run a whole study of the paper", _add_reproduce, _reproduce),
    "report": ("write the HTML report of evaluated runs", _add_report, _report),
}


class OneLineParser(ArgumentParser):
    """A parser that reports a mistake as everything else here does: in one line, with exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        told_by = (getattr(ex, "subcommand_parser", None) or self).prog.replace(" [options]", "")
        print(f"{told_by}: {_one_line(message)} (see {told_by} --help)", file=sys.stderr)
        self.exit(2)


def _one_line(message: str) -> str:
    """jsonargparse's report of a mistake, which may take ten lines, in one."""
    message = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", message).replace("NoneType", "null")
    message = re.sub(r'^Parser key "(\w+)"( element \d+)?:', r"--\1\2:", message.strip())
    union = re.fullmatch(r"(--\w+:).*Subtypes: \[([^\n]*)\]\n.*Given value: (.*)", message, re.DOTALL)
    if union:
        message = f"{union[1]} expected {' or '.join(union[2].split(', '))}, got {union[3]}"
    return " ".join(message.replace("Expected a typing.Literal", "Expected one of ").split())


def parser() -> ArgumentParser:
    """The whole command line."""
    top = OneLineParser(
        prog="fewsure",
        description="Few-shot classification that is sure only when it should be.",
        epilog=EPILOG,
        version=__version__,
    )
    verbs = top.add_subcommands(dest="verb", metavar="VERB")
    for name, (summary, add, _) in VERBS.items():
        verb = OneLineParser(description=f"{summary[0].upper()}{summary[1:]}.")
        verb.add_argument("--config", action="config", help="read flags from a YAML or JSON file")
        add(verb)
        verbs.add_subcommand(name, verb, help=summary)
    return top


def _fields(told: Namespace) -> dict[str, Any]:
    """What a verb was told, without what is not a field of its configuration."""
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in vars(told).items()}
    return {key: value for key, value in lists.items() if key not in ("config", "out", "run", "study")}


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; the exit code."""
    whole = parser()
    try:
        told = whole.parse_args(arguments)
    except Exception as error:  # jsonargparse lets some through: of a file that is not text, a dict for a list, ...
        whole.error(f"cannot read the configuration: {error}")
    verb = told.verb
    try:
        VERBS[verb][2](told[verb])
    except FewsureError as error:
        print(f"fewsure {verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fewsure {verb}: interrupted; the same command resumes it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
