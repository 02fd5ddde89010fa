"""The page: runs to sections, sections to one HTML file that loads nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fewsure import persist
from fewsure.report import covariances, curves, differences, frontier, headline, provenance, surfaces
from fewsure.report.drawing import STYLE, prefixed
from fewsure.report.parts import Section
from fewsure.report.runs import Group, find, group, read
from fewsure.train import check_device

REPORT = "report.html"


def write_page(folders: Sequence[str | Path], out: str | Path, *, seed: int, device: str) -> Path:
    """Write `out/report.html` and return its path."""
    check_device(device)
    found, left_out = find(folders)
    groups = group(map(read, found))
    path = persist.writable_folder(out) / REPORT
    with matplotlib.rc_context(STYLE):
        page = render(sections(groups, left_out, seed, device), groups)
    persist.write_bytes(path, page.encode())
    return path


def sections(groups: Sequence[Group], left_out: Sequence[Path], seed: int, device: str) -> list[Section]:
    """The sections that these runs have something for."""
    plane = surfaces.planar(groups)
    made = [
        headline.section(groups),
        differences.section(groups),
        surfaces.samples_section(plane, seed) if plane else None,
        surfaces.surfaces_section(plane, seed, device) if plane else None,
        covariances.section(groups, seed, device),
        curves.reliability_section(groups),
        curves.temperature_section(groups),
        frontier.section(groups),
        provenance.section(groups, left_out, seed),
    ]
    return [section for section in made if section is not None]


def render(content: Sequence[Section], groups: Sequence[Group]) -> str:
    """Sections to HTML. Text is escaped; images are our own markup, and get ids of their own."""
    number = itertools.count()
    environment = Environment(
        loader=PackageLoader("fewsure", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = lambda image: Markup(prefixed(image, f"f{next(number)}-"))
    return environment.get_template("report.html.j2").render(sections=content, groups=groups)
