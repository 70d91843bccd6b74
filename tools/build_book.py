"""Build the book with warnings as errors, and print where it is.

A failed build leaves no page that somebody could take for a good one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))
import recorded_pages  # noqa: E402
from pplab_page import address_in  # noqa: E402

PAGE = ROOT / "_build" / "html" / "index.html"
CACHE = ROOT / "_build" / ".jupyter_cache"

NOWHERE = (
    '== WARNING: NO ADDRESS OF THE BOOK\'S SOURCE IS SET: its pages say "clone the repository" and lead nowhere. '
    "Set urls.Repository in pyproject.toml, or PPLAB_REPOSITORY=https://HOST/OWNER/NAME in the environment"
)


def main() -> int:
    """Build, and return the exit status."""
    print("== building the book")
    recorded_pages.hand_to(CACHE)
    # Sphinx makes many small things that stay: a collector of garbage would look through them in vain.
    start = "import gc; gc.disable(); from jupyter_book.cli.main import main; gc.freeze(); "
    start += "gc.set_threshold(100_000, 20, 100); gc.enable(); "
    start += "from tools.kernel_ports import OwnPorts; OwnPorts.instance(); main()"
    command = [sys.executable, "-c", start, "build", ".", "--all", "-W", "-n", "--keep-going"]
    environment = {
        "HF_HUB_OFFLINE": "1",  # pages with code fetch nothing, unless HF_HUB_OFFLINE=0 is asked for
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment)
    if done.returncode:
        shutil.rmtree(PAGE.parent, ignore_errors=True)
        print(f"== the book was not built (status {done.returncode}): see the warnings above", file=sys.stderr)
        reports = sorted(CACHE.rglob("*.err.log")) or sorted((ROOT / "_build" / "html" / "reports").rglob("*.err.log"))
        for report in reports:
            print(f"== {report.relative_to(ROOT)}\n{report.read_text()[-3000:]}", file=sys.stderr)
        return done.returncode
    print(f"== open {PAGE.as_uri()}", flush=True)
    if not address_in(ROOT):
        print(NOWHERE, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
