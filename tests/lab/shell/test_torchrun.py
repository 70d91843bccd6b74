"""The run under torchrun on two nodes: two launchers that know each other only by an address, as on two hosts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pplab as pp
from pplab import lab
from pplab.__main__ import main

pytestmark = pytest.mark.slow


def launch(program: list[str], **environment: str) -> None:
    """Run a program once on each of two nodes; `{port}` stands for a free one, and `{node}` for the node's number.

    Another process may take the port meanwhile. Then nodes wait in vain: AssertionError says where they stand.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    nodes, settings = [], {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    for node in range(2):
        own = {name: value.format(port=port, node=node) for name, value in environment.items()}
        command = [sys.executable, *(word.format(port=port) for word in program)]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen(command, env={**os.environ, **settings, **own}, **output))
    try:
        printed = [node.communicate(timeout=60)[0] for node in nodes]
    except subprocess.TimeoutExpired:
        for node in nodes:
            node.send_signal(signal.SIGABRT)
        raise AssertionError("\n".join(node.communicate()[0] for node in nodes)) from None
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], printed


def test_two_nodes_give_the_numbers_of_one_process_clip_and_save_and_a_pool_goes_on(tmp_path):
    path, out = tmp_path / "run.safetensors", tmp_path / "run.json"
    program = "-m pplab train --device cpu --source sample --schedule 1F1B --ranks 2 --microbatches 4 --batch-size 8 "
    program += f"--steps 2 --clip-norm 0.5 --check-gradients --json {out} "
    nodes = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id pplab "
    launch([*f"{nodes} --rdzv-endpoint 127.0.0.1:{{port}} {program}".split(), "--save", str(path)])
    first = json.loads(out.read_text())
    assert first["transport"] == "gloo"
    assert any("each host's clock is tied to rank 0's" in note for note in first["notes"])
    assert main([*program.split()[2:], "--resume", str(path)]) == 0
    rest = json.loads(out.read_text())
    assert (first["first_step"], rest["first_step"]) == (0, 2)
    for run in (first, rest):
        assert run["gradients"]["equal"] and run["peak_in_flight"] == [2, 1]
        assert len(run["losses"]) == len(run["gradient_norms"]) == 2


@pytest.mark.timed
@pytest.mark.long  # a minute; test_a_clock_that_is_far_off_is_said runs at every commit
def test_hosts_whose_clocks_are_hours_apart_measure_what_one_host_does(tmp_path):
    """A step is as long, its bubble as large, and nothing arrives earlier than the said error before it was made.

    What torchrun would put there is there, without the seconds in which it starts beside nothing else."""
    out, local = tmp_path / "runs.json", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}", "RANK": "{node}", "WORLD_SIZE": "2"}
    launch([str(Path(__file__).parents[2] / "two_hosts.py"), str(out)], **address, **local)
    runs = json.loads(out.read_text())
    predicted = pp.simulate(pp.build("1F1B", num_ranks=2, num_microbatches=4), pp.Costs(20, 20, 20))
    for run in runs.values():
        assert 0.9 < run["step_time_ms"] / predicted.makespan < 2
        assert run["bubble_fraction"] == pytest.approx(predicted.bubble_fraction, abs=0.15)
        assert 0 < run["clock_error_ms"] < 0.1 * run["step_time_ms"]
        assert any(f"{run['clock_error_ms']:.2f} ms off" in note for note in run["notes"])
        for timeline in map(lab.timeline_from_dict, run["timelines"]):
            at = {str(span.action): span for span in timeline.spans}
            for m in range(4):
                assert at[f"1F{m}"].start > at[f"0F{m}"].end - run["clock_error_ms"]
                assert at[f"0B{m}"].start > at[f"1B{m}"].end - run["clock_error_ms"]
    assert runs["ahead"]["step_time_ms"] / runs["same"]["step_time_ms"] == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("local, several", [("4", False), ("2", True), (None, True)])
def test_only_the_ranks_of_one_launcher_share_a_clock_for_certain(monkeypatch, local, several):
    from pplab.lab.shell.torchrun import several_hosts

    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "4"} | ({"LOCAL_WORLD_SIZE": local} if local else {}))
    assert several_hosts() == several
