"""What single chapters of practice need beside the small package: where the time of a step went, predictions, layouts,
torch's own engine, checkpoints, profiles. It imports `pplab`, and `pplab` never imports it."""

from importlib import import_module as _import_module

_HOMES = {
    "checkpoint": ("Checkpoint", "CheckpointError", "Resume", "Save"),
    "clip": ("Clip",),
    "mps": ("Mps",),
    "profiling": ("Profile",),
    "torch_engine": ("TorchEngine",),
    "charts": ("bars", "ranks", "stacked", "waterfall"),
    "message_chart": ("messages",),
    "attribution": ("where", "calibrate", "calibrating", "Where", "Gap"),
    "layer_profile": ("LayerProfile", "profile_layers"),
    "partitioning": ("partition",),
    "prediction": ("Prediction", "predict"),
    "queues": ("simulate_lowered", "parse_lowered"),
    "replicas": ("replicate",),
    "sweeps": ("sweep", "Sweep"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = list(_HOME_OF)


def __getattr__(name: str):
    if name in _HOME_OF:
        return getattr(_import_module(f".{_HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
