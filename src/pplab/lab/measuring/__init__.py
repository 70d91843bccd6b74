"""Where the time of a measured step went, what a machine can do, and what a run will take.

Chapters 2, 5, 6, 9, 11 and 14 use it, and `make gpu`. Times are measured, never asserted.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "attribution": "Gap IDLE_PARTS Where calibrate calibrating where",
        "gpu_batch": "MOST Reached kept_by_layer long_enough most_that_fits on_card out_of_memory parameters",
        "launches": "BOUND Launches",
        "layers": "MeasuredLayers measure_layers",
        "mps": "CONTROL Mps",
        "one_gpu": "OneGpuPool SWITCH",
        "prediction": "Prediction check predict",
        "probe": "all_reduce_times fit_link measure_link message_times multiply_times",
        "profiles": "profile_table profiles",
        "profiling": "Profile",
    },
)
