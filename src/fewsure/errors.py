"""The one exception that a user's mistake raises. The command line prints it as one line and exits with code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class FewsureError(ValueError):
    """A value is not what it should be: the message names the value, the expectation and the fix."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> FewsureError:
    """The error for a name that is in none of our tables, with the nearest that is."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return FewsureError(f"unknown {kind} {name!r}: expected one of {', '.join(known)}{hint}")
