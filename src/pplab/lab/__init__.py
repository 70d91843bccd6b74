"""What single chapters need beside the small package: the running case and its ledger, the papers' closed forms, the
models that are trained and their data, where the time of a step went, predictions, layouts, torch's own engine,
checkpoints, profiles. It imports `pplab`, and `pplab` never imports it.

One file per thing, opened when one of its names is asked for; but for the schedules, which `pplab.build` knows from
then on. Once it is imported, a run whose gradients aren't those of one process says why.
"""

from ..optional import bring as _bring

_HOMES = {
    "attribution": ("where", "calibrate", "calibrating", "Where", "Gap"),
    "against_torch": ("versus", "Versus"),
    "balance_sheet": ("num_messages", "table"),
    "checkpoint": ("Checkpoint", "CheckpointError"),
    "beside": ("Beside",),
    "block": ("Block",),
    "bounds": ("Floor", "floor"),
    "budget": ("Budget",),
    "case": ("Case", "Entry", "Ledger"),
    "charts": ("bars", "ranks", "stacked", "waterfall"),
    "clip": ("Clip",),
    "controllable": ("repeated", "v_block", "v_half", "v_half_block", "v_min", "v_min_block", "zb_v_block"),
    "csv_form": ("read_csv", "to_csv"),
    "evaluation": ("Evaluate",),
    "explorer": ("Exploration", "explore"),
    "expert_layers": ("ExpertLayers",),
    "experts": ("Experts",),
    "exact": ("BestSoFar", "Optimum", "optimum"),
    "frontier": ("Frontier", "Point", "frontier_chart", "frontiers", "optima"),
    "fsdp": ("fsdp_row",),
    "gpu_batch": ("Reached", "long_enough"),
    "gpu_calls": ("host_calls",),
    "gpu_machine": ("GpuMachine", "hanging_waits"),
    "greedy": ("depth_first",),
    "growth": ("Policy",),
    "json_form": ("run_to_dict", "timeline_from_dict", "timeline_to_dict"),
    "launches": ("Launches",),
    "layers": ("MeasuredLayers", "measure_layers"),
    "layout": ("Layout", "Machine", "Plan", "best", "dp_degree", "layouts", "plan"),
    "learning_rate": ("LearningRate",),
    "memory": ("held_over_time", "memory_chart"),
    "meter": ("Held", "Meter", "readable_bytes"),
    "mps": ("Mps",),
    "offload": ("Offload", "Offloaded", "offloaded_row"),
    "pace": ("Pace",),
    "pairs": ("with_all_to_all",),
    "partitioning": ("partition",),
    "perfetto": ("to_perfetto",),
    "pieces": ("Pieces",),
    "prediction": ("Prediction", "predict"),
    "probe": ("fit_link", "measure_link", "message_times", "multiply_times"),
    "problem": ("Problem",),
    "profiling": ("Profile",),
    "progress": ("Progress",),
    "queues": ("simulate_lowered", "parse_lowered"),
    "recompute": ("Recompute",),
    "replicas": ("replicate",),
    "resuming": ("Resume",),
    "saving": ("NotSaved", "Save"),
    "searching": ("Found", "search", "zb_1p", "zb_2p"),
    "serve": ("Decoded", "decode"),
    "sliced_case": ("best_slices", "sliced_row"),
    "sliced_chart": ("sliced_gantt",),
    "sliced_schedules": ("check_slices", "last_first"),
    "slices": ("Slices",),
    "small_case": ("SmallCase",),
    "sweeps": ("sweep", "Sweep"),
    "to_host": ("OnHost", "ToHost"),
    "torch_engine": ("TorchEngine",),
    "torch_rows": ("lower_by_torch", "refusals", "take_steps"),
    "torchrun": ("train_here",),
    "transformer": ("Transformer",),
    "under_prediction": ("measure_under", "Measured", "UnderPrediction"),
    "vocabulary": ("VocabularyParallel", "vocabulary_row"),
    "whole_model": ("Reference", "reference"),
}
# What these define is used under their name: `lab.results.tables()`.
_MODULES = ("data", "formulas", "models", "profiles", "results")
for _name in ("more_schedules", "pairs", "searching", "controllable", "sliced_schedules"):  # they register theirs
    _bring(f"{__name__}.{_name}")
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [*_HOME_OF, *_MODULES]


def find_causes(*arguments: object) -> tuple[str, ...]:
    """Why gradients aren't those of one process: `pplab.runtime.reference` asks here, if this is imported."""
    return _bring(f"{__name__}.causes").find_causes(*arguments)


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(_bring(f"{__name__}.{_HOME_OF[name]}"), name)
    if name in _MODULES:
        return _bring(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
