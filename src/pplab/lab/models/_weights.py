"""Weights of transformers' models, a stage at a time: read from safetensors, or drawn at random.

A model is built on the meta device, where it has names and shapes but no memory. Then only the
tensors of one stage are made. A random weight depends on its name and the seed, so it is the same
however the model is cut.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..forms import printable
from . import data
from ._families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Of a repository on the hub: not every copy of the weights in every format.
TOKENIZER = ("*token*", "vocab*", "merges.txt", "*.model", "chat_template*")
WANTED = ["config.json", "model*.safetensors", "model.safetensors.index.json", *TOKENIZER]
# a head, which a checkpoint may lack
_NEW = ("lm_head.", "classifier.", "pre_classifier.", "bert.pooler.")
_AUTO = {
    "causal": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def skeleton(
    config: PreTrainedConfig, attention: str, dropout: float | None, untied: Sequence[str] = ()
) -> PreTrainedModel:
    """The model on the meta device, in float32. `dropout` replaces all of the config's rates, if it
    isn't None. `untied` weights are separate, although transformers ties them to others.
    """
    import transformers

    config = copy.deepcopy(config)
    for name, value in config.to_dict().items():
        if (
            dropout is not None
            and ("dropout" in name or "pdrop" in name)
            and isinstance(value, float)
        ):
            setattr(config, name, dropout)
    auto = getattr(transformers, _AUTO[family_of(config.model_type).task])
    with torch.device("meta"):
        model = auto.from_config(config, attn_implementation=attention, dtype=torch.float32).train()
    for name in untied:
        where, _, slot = name.rpartition(".")
        shared = model.get_parameter(name)
        setattr(model.get_submodule(where), slot, nn.Parameter(torch.empty_like(shared)))
    return model


def materialise(
    model: PreTrainedModel, held: Sequence[str], seed: int, weights: Weights | None
) -> None:
    """Give `model`, a skeleton, real tensors under the names `held`: those in `weights`, or random
    ones.
    """
    tensors = dict(tensors_of(model))
    own = {id(tensors[name]) for name in held}
    names = {each: found for each, found in names_of(tensors.items()).items() if each in own}
    made: dict[int, Tensor] = {}
    with weights.open() if weights else ExitStack():
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                for slot, t in slots.items():
                    if id(t) in names:
                        if id(t) not in made:
                            made[id(t)] = _make(
                                t,
                                weights and weights.read(names[id(t)], isinstance(t, nn.Parameter)),
                            )
                        slots[slot] = made[id(t)]
    named = {made[each].untyped_storage().data_ptr(): found[0] for each, found in names.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _Seeded(named, seed):
        _initialise(model, model)


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, under all their names."""
    named = (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    return [*named[0], *named[1]]


def names_of(named: Iterable[tuple[str, Tensor]]) -> dict[int, list[str]]:
    """All names of every tensor, by its id. The first is the one that a tied weight goes by."""
    names: dict[int, list[str]] = {}
    for name, t in named:
        names.setdefault(id(t), []).append(name)
    return names


def _make(t: Tensor, read: Tensor | None) -> Tensor:
    # A copy: what is read is the file, mapped, and a file that is written again would take the
    # weights along.
    made = torch.empty_like(t, device="cpu") if read is None else read.to(t.dtype, copy=True)
    if isinstance(t, nn.Parameter):
        made = nn.Parameter(made, t.requires_grad)
    # transformers draws nothing for a tensor that says so
    made._is_hf_initialized = read is not None
    return made


def _initialise(module: nn.Module, of: PreTrainedModel) -> None:
    """Let every (sub)model of transformers initialise its modules, innermost first, as transformers
    does.
    """
    for child in module.children():
        _initialise(child, child if hasattr(child, "_init_weights") else of)
    of._init_weights(module)


class _Seeded(TorchDispatchMode):
    """Draws every tensor from a seed of its own, made from its name."""

    def __init__(self, names: Mapping[int, str], seed: int):
        super().__init__()
        self.names, self.seed = names, seed

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(args[0], Tensor):
            if args[0].is_meta:
                return args[0]  # nothing to fill, and making sure of it takes milliseconds
            name = self.names.get(args[0].untyped_storage().data_ptr(), "")
            digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
        return func(*args, **kwargs or {})


def check_numbers(weight: Tensor, name: str, place: str | Path) -> None:
    """Raise ValueError, which names the weight and its file, if it holds NaN or infinity, because a
    run with it has no loss. It looks at every value once, in a tenth of the time that the weight
    then takes to copy.
    """
    if not weight.is_floating_point() or not weight.numel():
        return
    # torch has no extremes of 8 bits
    weight = weight if weight.element_size() > 1 else weight.float()
    if not torch.stack(torch.aminmax(weight)).isfinite().all():
        wrong = weight.numel() - int(weight.isfinite().sum())
        raise ValueError(
            f"{place}: {wrong:,} of the {weight.numel():,} values of {printable(name)} are NaN or "
            "infinite, and no run can learn with them: fetch or copy the folder again, or take "
            "weights from before they went wrong"
        )


def _opened(path: Path) -> Any:
    """A file of safetensors. Raises ValueError, which names it, if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        said = f"{path} is damaged, or no file of safetensors ({error}): fetch or copy it again"
        raise ValueError(printable(said)) from None


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor by the tensor's name, from an index. Raises ValueError for what isn't
    one.
    """
    try:
        files = json.loads(path.read_text())["weight_map"]
        if all(isinstance(name, str) for name in files.values()):
            return files
        error = "the name of a file is no text"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as wrong:
        error = f"{type(wrong).__name__}: {wrong}"
    raise ValueError(
        f"{path} is damaged, or no index of weights ({error}): fetch or copy the folder again, "
        "whose other files may be incomplete, too"
    )


class Weights:
    """The safetensors files of a folder, from which tensors are read one at a time.

    Raises FileNotFoundError for a folder without them, and ValueError for damaged files.
    """

    def __init__(self, folder: str, model: PreTrainedModel):
        self.folder, self._prefix = Path(folder), model.base_model_prefix + "."
        index, single = (
            self.folder / "model.safetensors.index.json",
            self.folder / "model.safetensors",
        )
        if index.is_file():
            self.files = _read_index(index)
        elif single.is_file():
            with _opened(single) as file:
                self.files = dict.fromkeys(file.keys(), single.name)
        else:
            found = (
                printable(", ".join(sorted(each.name for each in self.folder.iterdir())))
                or "nothing"
            )
            raise FileNotFoundError(
                f"{folder} has no weights: expected model.safetensors, or "
                "model.safetensors.index.json and the files that it names, found "
                f"{found}. Save the model there with model.save_pretrained(folder)"
            )
        self._opened: dict[str, object] = {}

    def open(self) -> ExitStack:
        """A context that closes the files, which are opened at their first tensor."""
        self._stack = ExitStack()
        self._stack.callback(self._opened.clear)
        return self._stack

    def key(self, names: list[str]) -> str | None:
        """The name in the files of a weight that has these names in the model. Files of a model
        without its head leave out the prefix, and old ones call a norm's weights gamma and beta.
        """
        for name in (*names, *(name.removeprefix(self._prefix) for name in names)):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            for each in (name, old):
                if each in self.files:
                    return each
        return None

    def _get(self, key: str, what: str = "get_tensor") -> Any:
        """A tensor of the files, or with "get_slice" an object that knows its shape."""
        from safetensors import SafetensorError

        name = self.files[key]
        if name not in self._opened:
            if not (self.folder / name).is_file():
                said = (
                    f"{self.folder} lacks {name}, which has {key}: fetch or copy the folder again"
                )
                raise FileNotFoundError(printable(said))
            self._opened[name] = self._stack.enter_context(_opened(self.folder / name))
        try:
            return getattr(self._opened[name], what)(key)
        except SafetensorError as error:
            where = f"{self.folder / name} has no {key}, which the folder's index says is there"
            raise ValueError(
                printable(f"{where} ({error}): fetch or copy the folder again")
            ) from None

    def read(self, names: list[str], is_weight: bool) -> Tensor | None:
        """A tensor, or None where the files don't have it. Its shape was checked when the workload
        was made. Raises ValueError for a weight that holds NaN or infinity. Buffers are taken as
        they are, because a mask may hold -inf.
        """
        if (key := self.key(names)) is None:
            return None
        tensor = self._get(key)
        if is_weight:
            check_numbers(tensor, key, self.folder / self.files[key])
        return tensor

    def untied(self, model: PreTrainedModel) -> tuple[str, ...]:
        """The names of weights that the model ties to others although their values in the files
        differ. transformers then treats them as separate weights, for example the head of a T5 of
        version 1.1.
        """
        found = []
        with self.open():
            for first, *others in names_of(model.named_parameters(remove_duplicate=False)).values():
                for name in others:
                    keys = self.key([first]), self.key([name])
                    if None not in keys and not torch.equal(*map(self._get, keys)):
                        found.append(name)
        return tuple(found)

    def check(self, model: PreTrainedModel) -> list[str]:
        """The names of a new head's weights, which the files don't have. Raises ValueError when the
        files belong to a different model.
        """
        names = names_of(model.named_parameters(remove_duplicate=False))
        new, missing, other = [], [], []
        with self.open():
            for p in model.parameters():
                found, key = names[id(p)], self.key(names[id(p)])
                if key is None:
                    (new if found[0].startswith(_NEW) else missing).append(found[0])
                elif (shape := tuple(self._get(key, "get_slice").get_shape())) != tuple(p.shape):
                    other.append(f"{found[0]} {shape} where the config makes {tuple(p.shape)}")
        if missing or other:
            said = [f"without {', '.join(missing[:3])}"] * bool(missing) + other[:3]
            raise ValueError(
                f"{self.folder} has the weights of another model than a {type(model).__name__} of "
                "its config: "
                f"{'; '.join(said)}. Give the folder with the config that these weights were saved "
                "with"
            )
        return new


def find_checkpoint(name: str, revision: str | None = None) -> tuple[str, str]:
    """The folder with a checkpoint, given a folder or a name on the hub, and its description.
    Raises OSError if there is none.
    """
    if Path(name).is_dir():
        return name, f"checkpoint in {name}"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"there is no folder {name}: give a folder with config.json and safetensors"
        )
    from huggingface_hub import snapshot_download

    try:
        local = not data.hub_is_reachable()
        return snapshot_download(
            name, revision=revision, allow_patterns=WANTED, local_files_only=local
        ), (f"the hub's {name}")
    except (OSError, ValueError) as error:  # ValueError: no name that the hub could have
        raise OSError(
            f"the hub's {name} can't be reached and isn't in its cache ({type(error).__name__}): "
            "check the network and the name, or give a folder"
        ) from error
