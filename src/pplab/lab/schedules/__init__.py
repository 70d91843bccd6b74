"""Schedules beyond the small package: building blocks that repeat (V-Half, V-Min), pairs around an all-to-all,
replicas, sequences in slices, eager 1F1B.

Chapters 4, 5, 7, 9 and 10 use them. Each is a schedule like the package's own: `pplab.build` knows those with a name,
and `validate` and `simulate` take all.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "block": "Block",
        "controllable": "repeated v_block v_blocks v_half v_half_block v_min v_min_block zb_v_block",
        "greedy": "depth_first",
        "replicas": "replicate",
        "sliced_case": "best_slices sliced_row",
        "sliced_chart": "sliced_gantt",
        "sliced_schedules": "check_slices last_first",
        "slices": "Slices",
    },
)
