"""What a page is made of. The template knows only these; what fills them lives in the modules beside this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One place of a table, and what stands small beneath it (the paper's value)."""

    text: str
    beneath: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Entry | str]]


@dataclass(frozen=True)
class Panel:
    """One image, as markup, and the line beneath it."""

    image: str
    caption: str


@dataclass(frozen=True)
class Panels:
    """Images that belong together. `layout` is the template's: "wide", "small", "three" or "two" to a row."""

    caption: str
    panels: Sequence[Panel]
    layout: str = "wide"


@dataclass(frozen=True)
class Key:
    """One sign of a legend: the glyph, its colour (none: that of the text), and what it stands for."""

    glyph: str
    meaning: str
    colour: str = "currentColor"


@dataclass(frozen=True)
class Part:
    """A piece of a section: words, tables, images; with a summary it is folded away beneath it."""

    heading: str = ""
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    images: Sequence[Panels] = ()
    summary: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page, which a table of contents links to."""

    slug: str
    title: str
    lead: Sequence[str]
    parts: Sequence[Part]
    legend: Sequence[Key] = ()
