"""Cut a model into stages: the embedding goes with the first, the head with the last, the layers evenly."""

from __future__ import annotations

from torch import nn

from ..errors import positive_int
from .gpt import GPT


def layer_ranges(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous layers for every stage, as even as they go; the first ones take what is left.

    >>> layer_ranges(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    check_layers(num_layers, num_stages)
    base, more = divmod(num_layers, num_stages)
    starts = [stage * base + min(stage, more) for stage in range(num_stages + 1)]
    return [range(first, end) for first, end in zip(starts, starts[1:], strict=False)]


def check_layers(num_layers: int, num_stages: int) -> None:
    """Raise ValueError when there are more stages than layers."""
    if positive_int("num_stages", num_stages) > num_layers:
        raise ValueError(
            f"{num_layers} layers can't make {num_stages} stages: a stage needs at least one layer. "
            f"Use at most {num_layers} stages, or a deeper model"
        )


def split(model: nn.Module, num_stages: int) -> list[nn.Module]:
    """The stages of `model`, which share its parameters and keep their names.

    The first stage takes the model's inputs, every other one the previous stage's output, the last one returns the
    model's output. Splits pplab's GPT, transformers' DistilBertForSequenceClassification and nn.Sequential; raises
    ValueError for another model and for more stages than layers.
    """
    if isinstance(model, GPT):
        ranges = layer_ranges(len(model.blocks), num_stages)
        return [model.part(layers) for layers in ranges]
    if isinstance(model, nn.Sequential):
        children = list(model.named_children())
        return [_named(children[r.start : r.stop]) for r in layer_ranges(len(children), num_stages)]
    if type(model).__name__ == "DistilBertForSequenceClassification":
        from .distilbert import DistilBertStage

        ranges = layer_ranges(len(model.distilbert.transformer.layer), num_stages)
        return [DistilBertStage(model, layers) for layers in ranges]
    raise ValueError(
        f"don't know how to split a {type(model).__name__}: pplab splits GPT, DistilBertForSequenceClassification and "
        "nn.Sequential. For another model make the stages yourself and pass runtime.Modules([stage0, stage1, ...])"
    )


def _named(children: list[tuple[str, nn.Module]]) -> nn.Sequential:
    stage = nn.Sequential()
    for name, module in children:
        stage.add_module(name, module)
    return stage
