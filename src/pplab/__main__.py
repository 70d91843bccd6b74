"""`python -m pplab`, which is the installed `pplab`, too: the one door through which both rings are entered."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import cli
from .lab import commands


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line with all that `pplab.lab` adds to it; returns the exit status."""
    return cli.main(arguments, more=commands.COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
