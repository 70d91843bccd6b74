"""One colour table for every drawing of a schedule: kind is colour, number is microbatch.
`lab.palette` adds to it.

All colours of a drawing stay apart for protanopia, deuteranopia and tritanopia, those of actions in
greyscale too: tests/pages/test_palette.py measures the distances.
"""

from __future__ import annotations

from .actions import B, F, I, Kind, W

FILL: dict[Kind, str] = {F: "#2f6db5", B: "#f0a13a", I: "#cf3131", W: "#a9dbc0"}
# Frames and lines; idle time in Gantt charts has the colour of text: plot.idle_styles.
IDLE = "#8a8f98"
OTHER = "#7f6e90"  # optimizer, barriers: what isn't an action of the schedule
NAME: dict[Kind, str] = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"}
