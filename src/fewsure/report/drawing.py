"""Figures to markup: SVG that takes the page's text colour, and small PNGs.

Text and axes are drawn in a placeholder colour that becomes `currentColor`, so one file serves light, dark and print;
the data colours (after Okabe and Ito, without yellow and black, and with a lighter blue, to read on white and on black)
are told apart by the colour-blind, and shapes or dashes say the same again.
"""

from __future__ import annotations

import base64
import html
import io
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy import ndarray as Array
from PIL import Image

INK = "#010203"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fewsure",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "text.color": INK,
    "text.parse_math": False,  # a file's names are text, whatever signs they hold
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "axes.formatter.useoffset": False,
    "lines.linewidth": 1.4,
}
COLOURS = ("#1E88C8", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "h")
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "★", "⬟", "⬢")

# The style element's rules would hold for the whole page; the page's own style has them instead.
_NEEDLESS = re.compile(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", re.DOTALL)
_ID = re.compile(r' id="([^"]*)"')
_REFERENCE = re.compile(r'(?:url\(|href=")#([^")]+)')
_INDENT = re.compile(r"\n +")
_COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"')
_NEEDLESS_DIGITS = re.compile(r"(?<=\.\d\d)\d+")  # a hundredth of a point is enough
_HEAD = re.compile(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"([^>]*>)')


@dataclass(frozen=True)
class RuleStyle:
    """How a rule looks, the same in every figure; glyphs are the legend's marker and line."""

    colour: str
    dashes: str
    line_glyph: str
    marker: str
    glyph: str


RULE_STYLES = {
    "softmax": RuleStyle("#D55E00", ":", "┈", "o", "●"),
    "logit-normal": RuleStyle("#009E73", "--", "╌", "s", "■"),
    "open-set": RuleStyle("#1E88C8", "-", "─", "^", "▲"),
}


def rule_style(rule: str) -> RuleStyle:
    """A rule's style, or that of all rules that have none of their own yet."""
    return RULE_STYLES.get(rule, RuleStyle("#CC79A7", "-.", "┄", "D", "◆"))


def class_style(index: int) -> tuple[str, str]:
    """A class's colour and marker; seven colours and ten markers name seventy classes."""
    return COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]


def svg(figure: Figure, label: str, backdrop: str | None = None) -> str:
    """A figure as inline SVG, its width left to the page; `label` is its text for those who do not see it.

    `backdrop` is the address of an image that fills the figure from behind: matplotlib would write the same image in
    true colour, at seven times the size.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, dpi=200, metadata={"Date": None})
    content = buffer.getvalue()
    content = _INDENT.sub("\n", _NEEDLESS.sub("", content[content.index("<svg") :]))
    content = _COORDINATES.sub(lambda match: _NEEDLESS_DIGITS.sub("", match[0]), content)
    wanted = set(_REFERENCE.findall(content))
    content = _ID.sub(lambda match: match[0] if match[1] in wanted else "", content)
    behind = f'<image width="100%" height="100%" preserveAspectRatio="none" href="{backdrop}"/>' if backdrop else ""
    named = f'role="img" aria-label="{html.escape(label)}"'
    content = _HEAD.sub(lambda match: f"{match[1]} {named}{match[2]}{behind}", content, count=1)
    return content.replace(INK, "currentColor").strip()


def prefixed(content: str, prefix: str) -> str:
    """Inline SVG whose ids, and the references to them, start with `prefix`: two figures of a page may share none."""
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", content)


def png(values: Array, colours: str, low: float, high: float) -> str:
    """A matrix as the data URI of an indexed PNG, one pixel a value, the first row at the top."""
    scaled = np.clip((values - low) / (high - low), 0, 1)
    image = Image.fromarray(np.round(255 * scaled).astype(np.uint8))
    palette = np.round(255 * colormaps[colours](np.arange(256))[:, :3]).astype(np.uint8)
    image.putpalette(palette.tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def log_axis(axis: Axis) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5, written as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def scale(colours: str) -> str:
    """A colour scale, from its lower end to its upper."""
    return image(png(np.linspace(0, 1, 256)[None], colours, 0.0, 1.0), "")


def image(address: str, label: str) -> str:
    """An image that is all there is to a figure."""
    return f'<img src="{address}" alt="{html.escape(label)}">'


def bare(side: float, extent: float) -> tuple[Figure, Axes]:
    """A square figure that is all plane, from `-extent` to `extent`, without ticks."""
    figure = Figure(figsize=(side, side))
    axes = figure.add_axes((0.004, 0.004, 0.992, 0.992), xticks=[], yticks=[])
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent))
    axes.spines[:].set_visible(True)
    return figure, axes
