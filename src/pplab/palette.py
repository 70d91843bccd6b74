"""One colour table for every drawing of a schedule. The kind of an action is its colour, and the
microbatch is its number. `lab.palette` adds to the table.

All colours of a drawing stay distinct for protanopia, deuteranopia and tritanopia, and those of
actions in greyscale, too. tests/pages/test_palette.py measures the distances.
"""

from __future__ import annotations

from .actions import B, F, I, Kind, W

FILL: dict[Kind, str] = {F: "#2f6db5", B: "#f0a13a", I: "#cf3131", W: "#a9dbc0"}
# Frames and lines; idle time in Gantt charts has the colour of text: plot.idle_styles.
IDLE = "#8a8f98"
OTHER = "#7f6e90"  # optimizer, barriers: what isn't an action of the schedule
NAME: dict[Kind, str] = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"}
