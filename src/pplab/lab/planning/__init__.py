"""From a model and machines to layouts and bills: closed forms, parameters and bytes of a transformer, layers cut into
stages, FSDP, the running case with its ledger; and plans as what frameworks are told.

All chapters use the formulas and the case, 6, 11 and 12 the rest. Formulas say where they hold, and are tested against
simulations.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "choosing": "Candidate Choice Unsure choose profiled",
        "gpus": "GPUS machine_of",
        "case": "Case Entry LLAMA_3_8B Ledger",
        "configs": "read_config",
        "expert_layers": "ExpertLayers",
        "formulas": (
            "bubble_fraction bubble_ratio floor_makespan formulas free_bandwidth free_tokens message_time "
            "one_f_one_b_peak_in_flight sharded_step"
        ),
        "fsdp": "fsdp_plan fsdp_row",
        "launch_line": "Launch read_launch",
        "layout": "Layout Machine layouts",
        "partitioning": "partition",
        "planner": "Plan plan",
        "state": "State",
        "to_paste": "WRITERS flags read_layout",
        "transformer": "Transformer",
    },
)
