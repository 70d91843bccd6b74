"""How long the chapters' executions take, and which take longer than a reader should wait."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

LIMIT = 120  # seconds, on two cores without a GPU


def cached(database: Path) -> dict[str, float]:
    """Seconds by chapter, from the book's cache: each as it was when it was last executed."""
    if not database.exists():
        return {}
    with closing(sqlite3.connect(database)) as cache:
        rows = cache.execute("SELECT uri, data FROM nbcache WHERE uri LIKE '%.ipynb' ORDER BY accessed").fetchall()
    return dict(sorted((Path(uri).stem, json.loads(data)["execution_seconds"]) for uri, data in dict(rows).items()))


def report(seconds: Mapping[str, float]) -> str:
    """A line per chapter, and a last one that names those over the limit. A warning: machines differ."""
    if not seconds:
        return "== no chapter was executed"
    lines = [f"   {took:5.0f} s  {name}" for name, took in seconds.items()]
    slow = [f"{name} ({took:.0f} s)" for name, took in seconds.items() if took > LIMIT]
    last = f"== WARNING: over {LIMIT} s: {', '.join(slow)}" if slow else f"== no chapter takes more than {LIMIT} s"
    return "\n".join(["== execution of the chapters", *lines, last])
