"""What single chapters need beside the small package, in rooms: a room says at its head what it is for, which chapters
use it and what it promises. A name of a room is a name of `lab`, and its file is opened when it is asked for. It
imports `pplab`, and `pplab` never imports it.
"""

from ..optional import lazily as _lazily

_ROOMS = {
    "against_torch": "Reference TorchEngine lower_by_torch reference refusals take_steps",
    "checkpoints": "Checkpoint CheckpointError NotSaved Resume Save",
    "experts": "Beside Experts Measured Pieces UnderPrediction measure_under",
    "extras": "Budget Causes Clip Evaluate Held LearningRate Log Meter Pace Recompute readable_bytes",
    "forms": (
        "Exploration bars explore held_over_time memory_chart num_messages ranks read_csv results run_to_dict "
        "stacked table timeline_from_dict timeline_to_dict to_csv to_perfetto waterfall"
    ),
    "measuring": (
        "Explained Gap MeasuredLayers Profile Traced WhatIf Where calibrate calibrating explain "
        "fit_link measure_layers measure_link message_times multiply_times "
        "read_traces watch_torch where"
    ),
    "models": "SmallCase data models",
    "planning": (
        "Candidate Case Choice Entry ExpertLayers Launch Layout Ledger Machine Plan State Transformer Unsure choose "
        "flags formulas fsdp_plan fsdp_row layouts machine_of partition plan profiled read_config "
        "read_launch read_layout"
    ),
    "schedules": (
        "Block Slices best_slices check_slices depth_first last_first repeated replicate schedules sliced_gantt "
        "sliced_row v_block v_half v_half_block v_min v_min_block zb_v_block"
    ),
    "searches": (
        "BestSoFar Floor Found Frontier Optimum Point Policy Problem check_memory floor frontier_chart frontiers "
        "optimum search zb_1p zb_2p"
    ),
    "shell": "train_here",
    "streams": (
        "Offload Offloaded VocabularyParallel offloaded_row parse_lowered simulate_lowered "
        "simulate_sends vocabulary_row"
    ),
}
__all__, __getattr__, __dir__ = _lazily(__name__, _ROOMS)
