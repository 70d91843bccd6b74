"""Where the time of a measured step went, what a machine can do, and what a run will take.

Chapters 2, 5, 6, 9, 11 and 14 use it, and `make gpu`. Times are measured, never asserted.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "attribution": "Gap IDLE_PARTS Where calibrate calibrating where",
        "explaining": "Explained WhatIf explain",
        "layers": "MeasuredLayers measure_layers",
        "probe": "fit_link measure_link message_times multiply_times",
        "profiling": "Profile",
        "trace_file": "watch_torch",
        "traces": "Traced read_traces",
    },
)
