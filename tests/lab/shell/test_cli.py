"""The command line, as a user calls it."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

import pplab as pp
from pplab import lab
from pplab.__main__ import main
from pplab.lab import replicate
from pplab.lab.shell import cli, commands
from pplab.runtime import Extra, Job, Options


def test_schedules_lists_all(capsys):
    assert main(["schedules"]) == 0
    said = capsys.readouterr().out
    assert all(
        builder.name in said and builder.rules in said and builder.source in said for builder in pp.builders.known()
    )
    assert main(["schedules", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [b.name for b in pp.builders.known()]
    assert [row["summary"] for row in rows if not row["summary"].endswith(".")] == []  # whole sentences


def test_simulate_prints_and_writes_everything(tmp_path, capsys):
    files = {name: tmp_path / f"out.{name}" for name in ("png", "perfetto", "csv", "json")}
    options = [x for name, path in files.items() for x in (f"--{name}", str(path))]
    assert (
        main(["simulate", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "8", "--latency", "1", *options]) == 0
    )
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["makespan"] == "49" and said["peak_in_flight"] == "4, 3, 2, 1"
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["perfetto"].read_text())["traceEvents"]
    assert lab.read_csv(files["csv"]) == pp.build("1F1B", num_ranks=4, num_microbatches=8)
    data = json.loads(files["json"].read_text())
    assert lab.timeline_from_dict(data).makespan == data["makespan"] == 49


def test_draw_prints_the_chart_and_a_deadlock_as_far_as_it_gets(tmp_path, capsys):
    assert main(["draw", "1F1B", "--ranks", "4", "--microbatches", "8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rank 0  F0F1F2F3............B0--F4B1--") and "\x1b" not in said
    assert "It takes 33, and 27.3% of all rank-time is idle. At most in flight: 4, 3, 2, 1." in said
    assert said.split("\n\n")[0] in (Path(__file__).parents[3] / "README.md").read_text()
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert main(["draw", "--csv", str(file)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("rank 0  F0??") and "deadlock: rank 0 waits at 0B0" in said.err


def test_simulate_takes_per_stage_times_and_prints_json(capsys):
    arguments = ["simulate", "--schedule", "GPipe", "--ranks", "2", "--microbatches", "1", "--json"]
    assert main([*arguments, "--forward", "1,2", "--backward-input", "3", "--backward-weight", "0.5,1"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 1 + 2 + 3 + 1 + 3 + 0.5


def test_simulate_takes_an_overhead_and_times_per_microbatch(capsys):
    def makespan(command: str) -> float:
        assert main(["simulate", "--json", *command.split()]) == 0
        return json.loads(capsys.readouterr().out)["makespan"]

    size = "--ranks 4 --microbatches 8"
    assert makespan(f"--schedule GPipe {size} --overhead 0.25") == 33 + 11 * 0.5
    assert makespan(f"--schedule GPipe {size} --overhead 0,0,0,0.25") == 33 + 8 * 0.5
    assert makespan(f"--schedule Interleaved1F1B {size} --overhead 0.25") == 28.5 + 2 * 9.5 * 0.5
    costs = pp.Costs([[1, 2.5, 1], 1], message=[[1, 5, 1], 0], bandwidth=1)
    wanted = pp.simulate(pp.build("1F1B", num_ranks=2, num_microbatches=3), costs).makespan
    two = "--schedule 1F1B --ranks 2 --microbatches 3 --forward 1:2.5:1,1 --bandwidth 1"
    assert makespan(f"{two} --message 1:5:1,0") == wanted
    assert main(f"simulate {two} --message 1:5,0".split()) == 1
    assert "message of stage 0 has 2 values for 3 microbatches: give one per microbatch" in capsys.readouterr().err
    assert main(f"simulate {two} --recompute 1:1:1".split()) == 1
    assert "recompute has 1 values for 2 stages" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(f"simulate {two} --message 1:x,0".split())
    assert "'1:x,0' is no number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert "--overhead T" in (said := capsys.readouterr().out) and "1:2:1,1:2:1" in said


def test_simulate_takes_bandwidths_overlaps_and_costs_for_a_search(capsys):
    base = ["simulate", "--ranks", "4", "--microbatches", "8", "--json"]
    assert main([*base, "--schedule", "GPipe", "--bandwidth", "2", "--message", "1", "--recompute", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 11 * 4 + 2 * 3 * 0.5
    assert main([*base, "--schedule", "DualPipe", "--overlap", "max"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] < 26
    assert main([*base, "--schedule", "ZB-2P", "--forward", "2"]) == 0
    searched = json.loads(capsys.readouterr().out)
    fixed = pp.simulate(pp.build("ZB-2P", num_ranks=4, num_microbatches=8), pp.Costs(forward=2))
    assert searched["span_bubble_fraction"] <= fixed.span_bubble_fraction


def simulated(capsys, command: str) -> tuple[float, str]:
    """The makespan, and what is printed of times."""
    assert main(["simulate", *command.split()]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    return float(said["makespan"]), said.get("times", "")


@pytest.mark.parametrize(("schedule", "sends", "units"), [("1F1B", "both wait", 52), ("1F1B", "nobody waits", 49)])
def test_simulate_takes_who_waits_for_sends(schedule, sends, units, capsys):
    asked = ["simulate", "--schedule", schedule, "--ranks", "4", "--microbatches", "8", "--latency", "1"]
    assert main([*asked, "--sends", sends, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == units
    assert main([*asked, "--sends", "forwards wait"]) == 1
    assert "'forwards wait' is for Interleaved1F1B's (Megatron-LM from core 0.18 on)" in capsys.readouterr().err


def test_simulate_compares_schedules_on_one_model(tmp_path, capsys):
    """A number is of a rank's whole share, however many stages that is cut into; a list is of stages."""
    size, costs = "--ranks 4 --microbatches 8", pp.Costs(3, 4, 2, latency=0.5, recompute=1)
    times = f"{size} --forward 3 --backward-input 4 --backward-weight 2 --latency 0.5 --recompute 1"
    for name, V in (("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2), ("DualPipe", 1), ("V-Half", 2)):
        options = {"costs": costs.finer(2)} if name == "V-Half" else {}
        s = pp.build(name, num_ranks=4, num_microbatches=8, **options)
        wanted = pp.simulate(s, costs.finer(V)).makespan
        share = f"numbers are of a rank's whole share, of which a stage takes 1/{V}" * (V > 1)
        assert simulated(capsys, f"--schedule {name} {times}") == (pytest.approx(wanted), share)
    interleaved = f"--schedule Interleaved1F1B {size}"
    assert simulated(capsys, interleaved)[0] == 28.5 < simulated(capsys, f"--schedule 1F1B {size}")[0] == 33
    assert simulated(capsys, f"{interleaved} --forward 1,1,1,1,1,1,1,1")[0] == 28.5 + 11 * 0.5 * 2 - 1.5
    file = tmp_path / "mine.csv"
    assert simulated(capsys, f"{interleaved} --stages-per-rank 3 --csv {file}") == simulated(capsys, f"--csv {file}")


def test_ranks_with_different_numbers_of_stages_have_the_same_share(tmp_path, capsys):
    file, costs = tmp_path / "uneven.csv", "--forward 2 --backward-input 3 --backward-weight 1,2,3 --recompute 1"
    file.write_text("0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1\n2F0,2B0,2F1,2B1\n")
    times = "numbers are of a rank's whole share, of which stages take 1/2, 1/2, 1; a list has each stage's own"
    assert main(f"simulate --csv {file} {costs} --overlap 5 --json".split()) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["makespan"], said["times"]) == simulated(capsys, f"--csv {file} {costs} --overlap 5")
    stages = pp.Costs((1, 1, 2), (1.5, 1.5, 3), (1, 2, 3), recompute=(0.5, 0.5, 1), overlap={(0, 1): 2.5})
    assert (said["makespan"], said["times"]) == (pp.simulate(lab.read_csv(file), stages).makespan, times)
    alone = simulated(capsys, f"--csv {file}")
    file.write_text(lab.to_csv(replicate(lab.read_csv(file), 2)))
    assert simulated(capsys, f"--csv {file}") == alone == (11, times.partition(";")[0])
    with_list = simulated(capsys, "--schedule Interleaved1F1B --ranks 2 --microbatches 2 --forward 1,1,1,1")[1]
    assert with_list.endswith("of which a stage takes 1/2; a list has each stage's own")


def test_sizes_beside_a_file_are_those_of_the_file(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text(lab.to_csv(pp.build("Interleaved1F1B", num_ranks=2, num_microbatches=4)))
    for command in (f"simulate --csv {file}", f"train --source sample --device cpu --csv {file}"):
        for flag, other, has in (("--ranks", 3, 2), ("--microbatches", 8, 4), ("--stages-per-rank", 1, 2)):
            assert main([*command.split(), flag, str(other)]) == 1
            assert f"{flag} {other}: {file} has {has}, and a file's sizes are fixed" in capsys.readouterr().err
    assert main(f"simulate --csv {file} --ranks 2 --microbatches 4 --stages-per-rank 2".split()) == 0


def test_a_file_that_is_no_text_is_refused_in_words(tmp_path, capsys):
    file = tmp_path / "binary.csv"
    file.write_bytes(b"\x7fELF\xd0\x00")
    for command in (["validate", str(file)], ["simulate", "--csv", str(file)]):
        assert main(command) == 1
        assert f"{file} is no text in UTF-8: expected a text file with a line per rank" in capsys.readouterr().err
    done = subprocess.run([sys.executable, "-m", "pplab", "validate", "-"], input=b"\xd0\x00", capture_output=True)
    assert done.returncode == 1 and b"standard input is no text in UTF-8" in done.stderr


def test_every_cost_has_a_flag():
    """But for those that take a table, a drawing's unit, and `backward`, which the halves' flags give."""
    flags = {flag["name"][2:].replace("-", "_") for flag in cli._COSTS}
    without = {field.name for field in fields(pp.Costs)} - flags - {"backward", "links", "unit"}
    assert not without, f"add flags for {without} to _COSTS in pplab/lab/shell/cli.py, or name them here"


def test_no_flag_answers_with_a_name_of_the_code(capsys):
    for command in (*cli.COMMANDS, *commands.COMMANDS):
        typed = [flag for flag in command.flags() if "type" in flag and flag["name"].startswith("--")]
        assert typed or command.name in ("schedules", "explain")
        for flag in typed:
            with pytest.raises(SystemExit):
                main([command.name, flag["name"], "a,b"])
            error = capsys.readouterr().err.splitlines()[-1]
            assert flag["name"] in error and "a,b" in error and " _" not in error, error


def test_what_doesnt_belong_there_is_answered_with_the_commands_usage(capsys):
    with pytest.raises(SystemExit):
        main("simulate 1F1B --ranks 4 --microbatches 8".split())
    error = capsys.readouterr().err
    assert "usage: pplab simulate --schedule NAME" in error and "unrecognized arguments: 1F1B (see" in error
    assert main("draw 1F1B --ranks 4 --microbatches 8 --stages-per-rank 2".split()) == 1
    assert "--stages-per-rank can't be chosen for 1F1B" in capsys.readouterr().err


def test_what_there_is_to_resume_from_is_said_to_somebody_in_a_shell(tmp_path, capsys):
    train = "train --schedule GPipe --ranks 2 --microbatches 2 --source sample --device cpu --resume".split()
    for place in (tmp_path, tmp_path / "nowhere"):
        assert main([*train, str(place)]) == 1
        assert "there is no checkpoint" in (error := capsys.readouterr().err) and "pplab train --save" in error


@pytest.mark.parametrize("command", ["schedules", "simulate --schedule 1F1B --ranks 16 --microbatches 256 --json"])
def test_a_pipe_that_is_closed_ends_quietly(command):
    process = subprocess.Popen(
        [sys.executable, "-m", "pplab", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()  # as `| head` does, at the latest
    assert (process.stderr.read(), process.wait()) == (b"", 141)
    process.stderr.close()


@pytest.mark.parametrize("command", ["schedules", "validate mine.csv", "simulate --csv mine.csv --json"])
def test_a_closed_standard_output_is_no_fault(command, tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0B0\n")
    closed = f"exec {shlex.quote(sys.executable)} -m pplab {command} >&-"
    done = subprocess.run(closed, shell=True, capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_csv_can_be_simulated_and_validated(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert main(["simulate", "--csv", str(path)]) == 0
    assert main(["validate", str(path)]) == 0
    said = capsys.readouterr().out
    assert "ok: mine.csv: 2 ranks, 2 stages, 2 microbatches, 8 actions; peak in flight 2, 1; it names no mess" in said


@pytest.mark.filterwarnings("always")
def test_a_lowered_files_messages_are_checked_and_what_was_not_looked_at_is_said(tmp_path, capsys):
    path = tmp_path / "lowered.csv"
    path.write_text("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert main(["validate", str(path)]) == 0
    told = "peak in flight 1, 1; 2 messages can arrive in every kind of queue; not looked at: 2 other actions\n"
    assert capsys.readouterr().out.endswith(told)
    assert main(["simulate", "--csv", str(path)]) == 0
    assert "are left out: pplab validate checks them" in capsys.readouterr().err
    path.write_text(path.read_text().replace("0SEND_F0,", ""))
    assert main(["validate", str(path)]) == 1
    assert "rank 0's row has no 0SEND_F0; add it behind 0F0" in capsys.readouterr().err
    sends_first = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    path.write_text(sends_first + "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1")
    assert main(["validate", str(path)]) == 1
    assert "(gloo) this runs, but not with a queue for each pair of ranks (NCCL's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("simulate --schedule 1F1b2 --ranks 2 --microbatches 2", "did you mean 1F1B"),
        ("simulate --schedule GPipe --ranks 0 --microbatches 2", "num_ranks must be an integer of at least 1, got 0"),
        ("simulate --schedule GPipe --ranks 2 --microbatches -3", "num_microbatches must be an integer of at least 1"),
        ("simulate --schedule GPipe --ranks 2", "needs --ranks and --microbatches"),
        ("simulate", "name a schedule"),
        (
            "simulate --schedule GPipe --ranks 2 --microbatches 2 --stages-per-rank 2",
            "--stages-per-rank can't be chosen for GPipe",
        ),
        ("simulate --schedule GPipe --ranks 2 --microbatches 2 --forward 1,2,3", "3 values for 2"),
        ("validate 'no such file.csv'", "there is no file no such file.csv: check its name, and the folder"),
        ("validate /", "/ can't be read or written: is a directory"),
        ("explain /no/traces", "there is no file /no/traces"),
        ("train --schedule GPipe --ranks 2 --microbatches 2 --model gtp", "did you mean gpt"),
        ("train --schedule GPipe --ranks 2 --microbatches 3 --source sample", "doesn't divide into 3"),
        ("train --schedule GPipe --ranks 9 --microbatches 2 --source sample", "8 layers can't make 9 stages"),
        ("train --schedule GPipe --ranks 2 --microbatches 2 --source sample --device gpu", "unknown device 'gpu'"),
        ("train --schedule GPipe --ranks 2 --microbatches 2 --source sample --engine jax", "unknown engine 'jax'"),
        (
            "train --schedule DualPipe --ranks 2 --microbatches 4 --source sample --engine torch",
            "torch's runtime doesn't know",
        ),
        (
            "train --schedule GPipe --ranks 2 --microbatches 2 --source sample --steps 0",
            "steps must be an integer of at least 1",
        ),
        ("train --schedule GPipe --ranks 2 --microbatches 2 --source sample --warmup -1", "warmup must be"),
        (
            "train --schedule GPipe --ranks 2 --microbatches 2 --source sample --replicas 0",
            "replicas must be an integer of at least 1",
        ),
        ("train --schedule GPipe --ranks 2 --microbatches 2 --source sample --clip-norm 0", "Clip's max_norm must be"),
        ("train --schedule GPipe --ranks 2 --microbatches 2 --source sample --save /no/file", "/no"),
        (
            "train --schedule GPipe --ranks 2 --microbatches 2 --source sample --resume /no/file",
            "no checkpoint /no/file",
        ),
        ("train --schedule GPipe --ranks 2 --microbatches 2 --perfetto /no/where.json", "there is no folder /no"),
        ("train --schedule GPipe --ranks 2 --microbatches 2 --csv /no/where.csv", "there is no folder /no"),
        (
            "train --schedule GPipe --ranks 2 --microbatches 2 --engine torch --explain",
            "--explain needs --engine pplab",
        ),
    ],
)
def test_bad_input_is_an_error_in_one_line(command, says, capsys):
    assert main(shlex.split(command)) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize("rate", ["nan", "-1", "inf", "fast"])
def test_a_learning_rate_that_is_none_is_refused_before_ranks_start(rate, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--schedule", "GPipe", "--ranks", "2", "--microbatches", "2", f"--learning-rate={rate}"])
    assert f"{rate} is not a learning rate: expected a number from 0 on" in capsys.readouterr().err


def test_a_deadlock_in_a_csv_is_explained(tmp_path, capsys):
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    for arguments in (["validate", str(path)], ["simulate", "--csv", str(path)]):
        assert main(arguments) == 1
        assert "deadlock: rank 0 waits at 0B0 for 1B0" in capsys.readouterr().err


def test_a_memory_cap_can_be_checked(tmp_path, capsys):
    path = tmp_path / "gpipe.csv"
    path.write_text(lab.to_csv(pp.build("GPipe", num_ranks=2, num_microbatches=4)))
    assert main(["validate", str(path), "--limit", "4"]) == 0
    assert main(["validate", str(path), "--limit", "2"]) == 1
    assert "memory limit: rank 0" in capsys.readouterr().err
    assert main(["validate", str(path), "--activation", "3", "--limit", "12"]) == 0
    assert main(["validate", str(path), "--activation", "3", "--limit", "11"]) == 1
    assert "memory limit: rank 0 holds 9" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate --rank x", "train --steps x", "train --learning-rate x", "jump"])
def test_a_wrong_usage_exits_with_2(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    assert caught.value.code == 2 and "usage: pplab" in capsys.readouterr().err


def flags_of(command: str, capsys) -> dict[str, str]:
    """What `--help` says of each flag."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    listed = re.split(r"\n  (?=-)", capsys.readouterr().out.partition("\noptions:")[2])[2:]
    return {each.split()[0]: " ".join(each.split()[1:]) for each in listed}


def test_pplab_alone_is_its_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"    {command.name} " in said for command in (*cli.COMMANDS, *commands.COMMANDS))
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out == said and len(re.findall("^    pplab ", said, re.M)) == 2


@pytest.mark.parametrize("name", [command.name for command in (*cli.COMMANDS, *commands.COMMANDS)])
def test_help_begins_with_a_sentence_and_examples_that_can_be_pasted(name, tmp_path, monkeypatch, capsys):
    """Those of schedules run, and of the others it is read what they ask for."""
    asked = []
    more = [command._replace(run=lambda given: asked.append(given)) for command in commands.COMMANDS]
    with pytest.raises(SystemExit):
        cli.main([name, "--help"], more)
    about, _, rest = capsys.readouterr().out.partition("\n\nexamples:\n")
    examples, _, options = rest.partition("\n\n")
    assert re.match(r"usage: pplab .*\n\n[A-Z][^.]+\.", about, re.S) and "likewise" not in options
    pasted = re.findall(r"^    (pplab (?:.*\\\n)*.*)$", examples, re.M)
    assert len(pasted) >= 2
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(lab.to_csv(pp.build("1F1B", num_ranks=4, num_microbatches=8)))
    for command in pasted:
        assert cli.main(shlex.split(command.replace("\\\n", ""))[1:], more) == 0, capsys.readouterr().err
    assert len(asked) == (0 if name in [command.name for command in cli.COMMANDS] else len(pasted))


def test_many_ranks_stand_in_columns(tmp_path, capsys):
    assert main("simulate --schedule 1F1B --ranks 64 --microbatches 64 --forward 1.5".split()) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "busy                   224 on each of 64 ranks\n" in said
    start = "  ranks 0-15:   64, 63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49\n"
    end = "  ranks 48-63:  16, 15, 14, 13, 12, 11, 10,  9,  8,  7,  6,  5,  4,  3,  2,  1\n"
    assert start in said and end in said
    file = tmp_path / "mine.csv"
    file.write_text(lab.to_csv(pp.build("1F1B", num_ranks=64, num_microbatches=64)))
    assert main(["validate", str(file)]) == 0
    assert f"peak in flight \n{start}" in capsys.readouterr().out


@pytest.mark.filterwarnings("always")
def test_a_warning_is_a_sentence_and_no_line_of_code(tmp_path, capsys):
    """Of a config whose model_type is another program's commands for the terminal."""
    fields = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    fields |= {"vocab_size": 32000, "hidden_act": "silu", "model_type": "llama"}
    sees = {"model_type": "evil\x1b]0;owned\x07\x1b[2J", "text_config": fields}
    (tmp_path / "config.json").write_text(json.dumps(sees))
    command = ["choose", str(tmp_path), *"--gpus 2 --gpu h100 --between 50GB/s --batch 4 --sequence 1024".split()]
    before = warnings.showwarning
    assert main(command) == 0 and warnings.showwarning is before
    said = capsys.readouterr().err
    assert said.startswith(r"pplab choose: evil\x1b]0;owned\x07\x1b[2J: only its language model is counted")
    assert said.count("\n") == 1 and "\x1b" not in said
    (tmp_path / "config.json").write_text(json.dumps(fields | {"layer_types": ["\x1b[2J"] * 8}))
    assert main(command) == 1 and "layers of \\x1b[2J aren't read: give lab.Model" in capsys.readouterr().err


def test_a_mistyped_model_asks_the_hub_once(tmp_path):
    """A hub that hangs up, where its own client asks six times, and waits longer each time."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with suppress(OSError):  # it is closed
                while True:
                    end, _ = server.accept()
                    if (request := end.recv(4096)).startswith(b"HEAD"):  # the client asks for other things, too
                        asked.append(request)
                    end.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        where |= {"HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        size = "--gpus 8 --gpu h100 --between 50GB/s --batch 8 --sequence 1024"
        for command in (f"choose no/such {size}", "train --schedule 1F1B --ranks 2 --microbatches 2 --model no/such"):
            asked.clear()
            words = [sys.executable, "-m", "pplab", *command.split()]
            done = subprocess.run(words, capture_output=True, text=True, env=os.environ | where)
            assert done.returncode == 1 and len(asked) == 1, (asked, done.stderr)
            assert "no/such" in done.stderr and "check the n" in done.stderr and done.stderr.count("\n") == 1


def test_train_has_a_flag_for_every_option_and_extra(capsys):
    shown = flags_of("train", capsys)
    flags = list(commands.option_flags())
    assert [flag["dest"] for flag in flags] == [each.name for each in fields(Options)]
    for flag in flags:
        assert flag["help"] in shown[flag["name"]]
        if flag["default"]:
            assert f"(default: {flag['default']})" in shown[flag["name"]]
    assert len(commands.EXTRAS) == 8
    for path in commands.EXTRAS:
        flag = resolve_name(path).flag
        assert flag["help"] in shown[flag["name"]]
    assert shown["--engine"].startswith("ENGINE runtime that")


@dataclass(frozen=True)
class Shout(Extra):
    """An extra with a number, which is refused before anything starts."""

    loudness: int
    flag = {"name": "--shout", "type": int, "metavar": "N", "help": "raise the voice"}

    def check(self, job: Job) -> Job:
        raise ValueError(f"{self.loudness} shouts under {job.schedule.name}")


class Whisper(Extra):
    """One without, refused likewise."""

    flag = {"name": "--whisper", "action": "store_true", "help": "lower the voice"}

    def check(self, job: Job) -> Job:
        raise ValueError(f"a whisper under {job.schedule.name}")


def test_a_new_extra_has_its_flag_by_being_listed(monkeypatch, capsys):
    monkeypatch.setattr(commands, "EXTRAS", [*commands.EXTRAS, f"{__name__}:Shout", f"{__name__}:Whisper"])
    shown = flags_of("train", capsys)
    assert shown["--shout"] == "N raise the voice" and shown["--whisper"] == "lower the voice"
    command = "train --schedule GPipe --ranks 2 --microbatches 2 --source sample --device cpu".split()
    assert main([*command, "--shout", "3"]) == 1
    assert capsys.readouterr().err == "pplab train: 3 shouts under GPipe\n"
    assert main([*command, "--whisper", "--replicas", "2"]) == 1
    assert capsys.readouterr().err == "pplab train: a whisper under GPipe, 2 replicas\n"


LIGHT = """
import sys
from pplab.__main__ import main
assert main("simulate --schedule GPipe --ranks 2 --microbatches 2".split()) == 0
assert "torch" not in sys.modules
try:
    main(["train", "--help"])
except SystemExit:
    pass
assert "torch" in sys.modules
"""


def test_commands_without_a_run_load_no_torch():
    subprocess.run([sys.executable, "-c", LIGHT], check=True, capture_output=True)


def test_the_installed_command_is_the_module():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert resolve_name(project["scripts"]["pplab"]) is main


def test_it_runs_as_a_module_and_reads_standard_input():
    done = subprocess.run(
        [sys.executable, "-m", "pplab", "validate", "-"], input="0F0,0B0\n1F0,1B0\n", text=True, capture_output=True
    )
    assert (done.returncode, done.stdout[:11]) == (0, "ok: stdin: ")


@pytest.mark.slow
def test_all_flags_of_extras_reach_the_run(tmp_path, capsys):
    out, saved = tmp_path / "run.json", tmp_path / "run.safetensors"
    command = "train --schedule 1F1B --ranks 1 --microbatches 2 --steps 1 --batch-size 4 --source sample --device cpu"
    first = f"{command} --clip-norm 0.5 --bf16 --recompute --save {saved} --json {out}"
    assert main(first.split()) == 0
    assert "gradient norm" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["precision"] == "bfloat16" and data["recomputed_of"] != [0]
    assert len(data["gradient_norms"]) == 1 and data["where"]["unit"] == "ms" and data["engine"] == "pplab"
    then = f"{command} --resume {saved} --engine torch --learning-rate 0.01 --json"
    assert main(then.split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["first_step"] == 1 and data["engine"] == "torch" and data["where"] is None


@pytest.mark.slow
def test_train_explains_and_records(tmp_path, capsys):
    trace, folder = tmp_path / "step.json", tmp_path / "traces"
    arguments = "train --schedule 1F1B --ranks 2 --microbatches 2 --steps 1 --batch-size 2 --source sample"
    extra = ["--explain", "--recompute", "--perfetto", str(trace), "--profile", str(folder)]
    assert main([*shlex.split(arguments), *extra]) == 0
    said = capsys.readouterr().out
    assert "jitter" in said and "pplab explain reads them" in said and "run again in the backward: all stages" in said
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0F0", "thread_name"} <= names


def test_a_model_that_is_made_here_has_the_sizes_asked_for(capsys):
    def asked(**given: object):
        usual = {"model": "gpt", "batch_size": 4, "source": "sample", **dict.fromkeys(commands.SIZES)}
        return commands.workload_of(SimpleNamespace(**usual | given))

    assert asked().config == asked(width=128).config
    found = asked(num_layers=3, width=1024, context=16).config
    assert (found.num_layers, found.width, found.context, found.num_heads) == (3, 1024, 16, 16)
    assert asked(model="mixture", width=64).config.num_heads == 4
    flags = ["--schedule", "1F1B", "--ranks", "2", "--microbatches", "2", "--model", "distilbert", "--layers", "3"]
    assert main(["train", *flags]) != 0
    assert "--layers: gpt and mixture have these sizes to choose" in capsys.readouterr().err
