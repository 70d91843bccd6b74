"""Remove the pins in a file of requirements: `name==version` becomes `name>=version` in a second file.

python tools/unpin.py requirements.txt newest.txt

The pinned version is then the oldest that is accepted, so there is always a solution, which is the pins. A package in
BELOW stays below a version that the course can't use yet. Comments and markers stay.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BELOW = {"jupyter-book": "2"}  # which is another program, without Sphinx


def unpinned(requirements: str) -> str:
    """The text of the file without its pins. Raises ValueError for a requirement that isn't pinned."""
    lines = []
    for line in requirements.splitlines():
        if line and not line.startswith("#"):
            if not (found := re.match(r"([\w.-]+)==", line)):
                raise ValueError(f"{line!r} isn't pinned: expected NAME==VERSION")
            limit = f"<{BELOW[found[1]]}," if found[1] in BELOW else ""
            line = line.replace("==", f"{limit}>=", 1)
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    pinned, newest = map(Path, sys.argv[1:])
    newest.write_text(unpinned(pinned.read_text()))
