"""`python -m pplab`: start the command line, which lives in the lab. Nothing else here imports from
there.
"""

import sys

from .lab.shell import main

if __name__ == "__main__":
    sys.exit(main())
