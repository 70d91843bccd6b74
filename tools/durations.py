"""Report how long the chapters' executions take, and which take longer than a reader should wait."""

from __future__ import annotations

from collections.abc import Mapping

LIMIT = 120  # seconds, on two cores without a GPU


def report(seconds: Mapping[str, float]) -> str:
    """A line per chapter, and a last one that names those over the limit. It is only a warning, because machines
    differ."""
    lines = [f"   {took:5.0f} s  {name}" for name, took in seconds.items()]
    slow = [f"{name} ({took:.0f} s)" for name, took in seconds.items() if took > LIMIT]
    last = f"== WARNING: over {LIMIT} s: {', '.join(slow)}" if slow else f"== no chapter takes more than {LIMIT} s"
    return "\n".join(["== execution of the chapters", *lines, last])
