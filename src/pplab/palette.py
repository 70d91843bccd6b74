"""One colour table for every drawing. In a chart of a schedule, kind is colour and number is microbatch.

All colours of a drawing stay apart for protanopia, deuteranopia and tritanopia, those of actions in greyscale too:
tests/pages/test_palette.py measures the distances.
"""

from __future__ import annotations

from .actions import B, F, I, Kind, W

FILL: dict[Kind, str] = {F: "#2f6db5", B: "#f0a13a", I: "#cf3131", W: "#a9dbc0"}
IDLE = "#8a8f98"
OTHER = "#7f6e90"  # optimizer, barriers: what isn't an action of the schedule
MESSAGE = {"send": "#3d3350", "receive": "#d9d2e9"}  # of a rank's queue, under its actions
NAME: dict[Kind, str] = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"}
PART: dict[str, str] = {  # of a step, in drawings of where its time went
    **{NAME[kind]: fill for kind, fill in FILL.items()},
    "overlap": "#1d4f72",
    "optimizer": OTHER,
    "gradients of both copies": "#a28dd1",
    "gradients of all copies": "#a28dd1",
    "clipping": "#5f6268",
    "bubble": "#e8e8ec",
    "imbalance": "#f2d376",
    "communication": "#79d7f4",
    "overhead": "#9a7a66",
    "jitter": "#79999f",
}
# What isn't a kind of action or a part of a step: ranks, layers, what memory holds.
CATEGORIES = ("#585c86", "#e4caba", "#21abb9", "#b1983e", "#d0c5f1", "#2b8649", "#313e48", "#79998b")
