"""Make texts of other people's files safe for a terminal, which takes some characters for commands.

What reads a file calls this where a text of the file becomes a name or goes into an error. The
command line calls it for everything that it prints.
"""

from __future__ import annotations

from typing import Any


def printable(text: str, keep: str = "") -> str:
    r"""The text with every character that doesn't print written as its escape, except for those in
    `keep`.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    strange = [each for each in {*text} - {*keep} if not each.isprintable()]
    return text.translate({ord(each): each.encode("unicode_escape").decode() for each in strange})


def printable_in(data: object, keep: str = "") -> Any:
    """Plain JSON values whose texts are all printable."""
    if isinstance(data, str):
        return printable(data, keep)
    if isinstance(data, dict):
        return {printable_in(name, keep): printable_in(value, keep) for name, value in data.items()}
    return [printable_in(value, keep) for value in data] if isinstance(data, list) else data
