"""`python -m pplab`, which is the installed `pplab`, too: the door to the command line, which is in the lab."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .lab import cli, commands


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return cli.main(arguments, more=commands.COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
