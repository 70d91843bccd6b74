"""`python -m pplab`: the command line, which is in the lab. The one import from there."""

import sys

from .lab.shell import main

if __name__ == "__main__":
    sys.exit(main())
