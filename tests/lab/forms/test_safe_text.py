"""Escape codes in strangers' files don't reach a terminal: what is shown of them is their escapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gpu_tables
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import pplab as pp
from pplab import lab
from pplab.__main__ import main
from pplab.lab import results
from pplab.lab.checkpoints import checkpoint
from pplab.lab.forms.safe_text import printable
from pplab.lab.models import Modules, from_transformers

EVIL = "\x1b]0;title\x07\x9b31m\u202e\x7f\udcff"  # a title, colour in one byte, text backwards, half a character
SHOWN = r"\x1b]0;title\x07\x9b31m\u202e\x7f\udcff"
NAME = "evil \x1b[31m\u202e"  # as a file may be called
ROWS = [["0F0", "0B0"]]


def harmless(text: str) -> bool:
    return all(each.isprintable() or each == "\n" for each in text)


def test_what_does_not_print_is_written_as_its_escape():
    assert printable(EVIL) == SHOWN and harmless(SHOWN)
    for text in ("", "1F1B: µ, 一, 🙂, é, \\x1b", "a\nb"):
        assert printable(text, keep="\n") == text
    assert printable("a\nb") == r"a\nb" and printable(printable(EVIL)) == SHOWN


def test_a_schedule_of_a_file(tmp_path, capsys):
    path = tmp_path / f"{NAME}\udcff.csv"
    path.write_text("0F0,0B0")
    for command in (["simulate", "--csv", str(path)], ["validate", str(path)]):
        assert main(command) == 0
        said = capsys.readouterr().out
        assert harmless(said) and r"evil \x1b[31m\u202e" in said
    path.write_text(f"0F0,{EVIL[:-1]}")
    for command in (["simulate", "--csv", str(path)], ["validate", str(path)], ["validate", f"{path}.not"]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert harmless(said) and r"\x1b" in said
    schedule = lab.read_csv("0F0,0B0", EVIL)
    assert harmless(f"{schedule}{schedule!r}{pp.simulate(schedule)}") and SHOWN in repr(schedule)
    with pytest.raises(pp.ScheduleError) as error:
        lab.read_csv(f"0F0,{EVIL}")
    assert harmless(str(error.value))


def test_all_that_the_command_line_says(tmp_path, capsys):
    evil = tmp_path / NAME
    for command in (["train", "--model", str(evil)], ["train", "--resume", str(evil)]):
        assert main([*command, "--schedule", "GPipe", "--ranks", "1", "--microbatches", "1", "--source", "sample"]) == 1
        said = capsys.readouterr().err
        assert harmless(said) and r"\x1b" in said


def test_a_timeline():
    spans = [[0, "0F0", 0, 1], [0, "0B0", 1, 3]]
    data = {
        "schedule": EVIL,
        "rows": ROWS,
        "unit": EVIL,
        "how": EVIL,
        "spans": spans,
        "others": [[0, f"a{EVIL}", 3, 4]],
    }
    timeline = lab.timeline_from_dict(data)
    assert SHOWN in timeline.schedule.name and timeline.unit == timeline.how == SHOWN
    assert timeline.others[0][1] == f"a{SHOWN}" and harmless(f"{timeline}{timeline!r}")
    assert lab.timeline_from_dict(lab.timeline_to_dict(timeline)) == timeline
    for damaged in (
        data | {"rows": [[EVIL]]},
        data | {"others": [[0, EVIL, 3, 4]]},
        data | {"spans": [[0, EVIL, 1, 2]]},
    ):
        with pytest.raises(ValueError, match="this timeline is damaged") as error:
            lab.timeline_from_dict(damaged)
        assert harmless(str(error.value))


def test_a_checkpoint(tmp_path):
    path, net = tmp_path / "run.safetensors", nn.Linear(2, 2)
    workload = Modules([net], [(torch.zeros(2, 2), torch.zeros(2, 2))], nn.functional.mse_loss)
    stranger = nn.ModuleDict({f"layer {EVIL[:-1]}".replace(".", ""): nn.Linear(3, 2)})
    saved = replace(checkpoint.collect([stranger], None, {}), optimizer=EVIL)
    checkpoint.write(path, [saved], 3, EVIL)
    found = lab.Checkpoint.open(path)
    assert found.model == found.optimizer == SHOWN and harmless(repr(found))
    with pytest.raises(
        lab.CheckpointError, match=r"a checkpoint of another model, \\x1b.*unknown .*layer \\x1b"
    ) as error:
        found.check_fits(workload)
    assert harmless(str(error.value))
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        told = file.metadata()
    key = next(iter(tensors))
    save_file(tensors | {key: tensors[key] + 1}, path, told)
    with pytest.raises(lab.CheckpointError, match=r"layer \\x1b.* isn't what was written") as error:
        lab.Checkpoint.open(path).check()
    assert harmless(str(error.value))
    save_file(tensors, path, {"pplab": json.dumps({"version": EVIL}), "seal": ""})
    with pytest.raises(lab.CheckpointError, match=r"version \\x1b") as error:
        lab.Checkpoint.open(path)
    assert harmless(str(error.value))


def test_a_trace(tmp_path):
    path = tmp_path / f"{NAME}.json"
    empty = {"distributedInfo": {"rank": 0}, "traceEvents": []}
    for text, says in (
        (json.dumps(empty), "names no action"),
        ('{"distributedInfo": 1}', "is damaged"),
        (EVIL[:-1], ""),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"evil \\x1b.* {says}") as error:
            lab.read_traces(path)
        assert harmless(str(error.value))


def test_a_config(recwarn):
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    config = sizes | {"vocab_size": 32000, "hidden_act": "silu", "model_type": "llama"}
    lab.read_config({"model_type": EVIL, "text_config": config}, 1024)
    assert SHOWN in (said := str(recwarn.pop().message)) and harmless(said)
    unknown = config | {"model_type": EVIL}
    for wrong in (config | {"layer_types": [EVIL] * 8}, unknown, {EVIL: 1}, sizes | {EVIL: {EVIL: [EVIL]}}):
        with pytest.raises(ValueError, match=r"\\x1b") as error:
            lab.read_config(wrong, 1024)
        assert harmless(str(error.value))


def test_a_folder_with_a_model(tmp_path):
    from transformers import LlamaConfig

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4)
    options = {"batch_size": 2, "length": 8, "source": "sample", "tokenizer": "bytes"}
    from_transformers(config, **options).build_whole().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / f"{NAME}.safetensors")
    refused = []

    def look(message: str) -> None:
        with pytest.raises((ValueError, OSError), match=message) as error:
            from_transformers(tmp_path, **options)
        refused.append(str(error.value))

    look(r"has no weights: .* found config.json, evil \\x1b")
    index = tmp_path / "model.safetensors.index.json"
    keys = load_file(tmp_path / f"{NAME}.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(keys, "\x1b[31m")}))
    look(r"lacks \\x1b\[31m, which has model")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(keys, f"{NAME}.safetensors")}))
    from_transformers(tmp_path, **options)
    (tmp_path / f"{NAME}.safetensors").write_bytes(b"{" * 100)
    look(r"evil \\x1b.*.safetensors is damaged, or no file of safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / f"{NAME}.safetensors")
    look(r"evil \\x1b.*.safetensors has no model.*, which the folder's index says is there")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": EVIL}))
    look("hidden_size must be an integer of at least 1")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": EVIL}))
    look(r"don't know where a model of type '\\x1b")
    assert all(map(harmless, refused))


def test_recorded_measurements(tmp_path):
    root = Path(__file__).parents[3] / "results"
    file = next(iter(sorted(root.glob("*.json"))))
    data = json.loads(file.read_text())
    (tmp_path / "evil.json").write_text(
        json.dumps(data | {"device": EVIL, "kind": "cpu", "not_run": [{"what": EVIL, "why": EVIL}]})
    )
    (found,) = results.load(tmp_path)
    assert (
        found.title().startswith(SHOWN)
        and harmless(str(gpu_tables.tables(tmp_path)))
        and SHOWN in str(gpu_tables.tables(tmp_path))
    )
    (tmp_path / "evil.json").write_text(json.dumps(data | {"form": EVIL}))
    with pytest.raises(ValueError, match="is not a recording") as error:
        results.load(tmp_path)
    assert harmless(str(error.value))
