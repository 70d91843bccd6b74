"""Colours of what isn't an action of a schedule: parts of a step, ranks, layers. They stay
distinct, too.
"""

from __future__ import annotations

from ...palette import FILL, NAME, OTHER

# of a step, in drawings of where its time went; its bubble looks as in Gantt charts
PART: dict[str, str] = {
    **{NAME[kind]: fill for kind, fill in FILL.items()},
    "work": "#585c86",  # all of it
    "overlap": "#1d4f72",
    "optimizer": OTHER,
    "gradients of both copies": "#a28dd1",
    "gradients of all copies": "#a28dd1",
    "clipping": "#5f6268",
    "imbalance": "#f2d376",
    "communication": "#79d7f4",
    "messages": "#79d7f4",
    "overhead": "#9a7a66",
    "jitter": "#79999f",
}
# What isn't a kind of action or a part of a step: ranks, layers, what memory holds.
CATEGORIES = (
    "#585c86",
    "#e4caba",
    "#21abb9",
    "#b1983e",
    "#d0c5f1",
    "#2b8649",
    "#313e48",
    "#79998b",
)
# matplotlib's first ones, in the course's notebooks
LINES = [CATEGORIES[number] for number in (0, 2, 3, 5, 7, 1)]
LIMIT = "#cf3131"  # what a GPU has room for
# Schedules are told apart by marks, of matplotlib's, and lines by colours: each has the same one in
# all drawings.
MARKS: dict[str, str] = dict(
    zip(
        "naive GPipe 1F1B eager-1F1B TeraPipe Seq1F1B Interleaved1F1B LoopedBFS paired-1F1B "
        "InterleavedZeroBubble ZB-H1 ZB-H2 ZB-1P ZB-2P ZBVZeroBubble V-Half V-Min DualPipe "
        "DualPipeV".split(),
        "xos8.p^h+PDd12v<>X*",
        strict=True,
    )
)
COLOURS = {
    name: CATEGORIES[int(one)] for name, one in zip(MARKS, "7700335757272737511", strict=True)
}
