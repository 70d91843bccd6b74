"""Long work tells how far it has come, where somebody looks: on a real pseudo-terminal and in a real kernel."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

TRAIN = "-m pplab train --schedule 1F1B --ranks 2 --microbatches 4 --steps 6 --source sample --device cpu"
CHOOSE = (
    "-m pplab choose layers=80,width=8192,heads=64,kv_heads=8,mlp=28672,vocabulary=128256,gated=true "
    "--gpus 64 --gpu h100 --between 50GB/s --batch 256 --sequence 4096 --tp 1,2,4"
)
A_WHILE = """
import time
from pplab.lab.forms import progress_line as line
with line() as tell:
    for number in range(60):
        tell(f"{number} of 60 " + "and so on " * 20)
        time.sleep(0.03)
"""
AT_ONCE = """
from pplab.lab.forms import progress_line as line
with line() as tell:
    tell("too short to need a line")
"""


def on_terminal(*arguments: str, columns: int = 80, **environment: str) -> tuple[str, str]:
    """What Python prints, and all that a terminal of so many columns is sent as its standard error."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"} | environment,
        text=True,
    )
    os.close(theirs)
    sent = b""
    try:
        while piece := os.read(ours, 2**16):
            sent += piece
    except OSError:  # the last one who had it open has gone
        pass
    os.close(ours)
    printed, _ = process.communicate()
    assert process.returncode == 0, sent
    return printed, sent.decode()


def test_a_terminals_line_is_rewritten_in_place_and_removed():
    for columns in (80, 33):
        printed, sent = on_terminal("-c", A_WHILE, columns=columns)
        *lines, end = sent.split("\x1b[K")
        assert not printed and not end and lines[-1] == "\r" and len(lines) > 3
        assert all(re.match(r"\r\d+ of 60 and so on ", line) and "\n" not in line for line in lines[:-1])
        assert {len(line) for line in lines[:-1]} == {columns}, "a longer one would begin a second line"


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_short_work_and_a_terminal_that_cant_rewrite_are_left_alone(terminal):
    assert on_terminal("-c", AT_ONCE if terminal == "xterm" else A_WHILE, TERM=terminal)[1] == ""


def test_where_nobody_looks_nothing_is_said():
    done = subprocess.run([sys.executable, "-c", A_WHILE], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    subprocess.run(f'"{sys.executable}" -c "$CODE" 2>&-', shell=True, check=True, env=os.environ | {"CODE": A_WHILE})


def test_a_terminal_that_goes_away_ends_no_work():
    """Its other end is closed meanwhile: what is written then fails."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", A_WHILE], stderr=theirs, start_new_session=True, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    assert process.wait() == 0


@pytest.mark.slow
def test_training_shows_steps_with_their_losses_and_choosing_its_layouts():
    printed, sent = on_terminal(*TRAIN.split())
    losses = re.search(r"^loss +(.+)$", printed, re.M)[1].split()
    shown = re.findall(r"\rstep (\d) of 6, loss ([\d.]+), [\d.]+ s\x1b\[K", sent)
    assert shown and sent.endswith("\r\x1b[K") and sent.count("\n") == 0
    for step, loss in shown:
        assert float(loss) == pytest.approx(float(losses[int(step) - 1]), abs=1e-3)
    printed, sent = on_terminal(*CHOOSE.split())
    assert "can't be told apart" in printed and re.search(r"\rplanning layout \d+ of \d+, [\d.]+ s\x1b\[K", sent)


@pytest.mark.slow
@pytest.mark.long  # as above, of a whole run
def test_training_into_a_pipe_says_nothing_but_its_result():
    done = subprocess.run([sys.executable, *TRAIN.split()], capture_output=True, text=True, check=True)
    assert done.stderr == "" and "loss  " in done.stdout


IN_A_CELL = """
import time
from functools import partial
import pplab as pp, torch
from pplab import lab
from pplab.runtime import Pool
with Pool(2, device="cpu") as pool:
    run = pool.train(pp.build("1F1B", num_ranks=2, num_microbatches=4), lab.models.gpt(source="sample"), steps=6)
"""
BARS = """
import warnings
def quiet(message, *_): print("warns of", str(message)[:9])
warnings.showwarning = quiet
{first}
import tqdm.auto
"""


def cell(code: str, somebody_looks: bool) -> list[tuple[str, dict]]:
    """The messages about outputs that a fresh kernel sends for a cell."""
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3", env=dict(os.environ))
    try:
        sent = []
        client.execute_interactive(
            code,
            allow_stdin=somebody_looks,  # as front ends ask, and programs that run notebooks don't
            stdin_hook=lambda message: None,
            output_hook=lambda message: sent.append((message["header"]["msg_type"], message["content"])),
        )
        return [(kind, content) for kind, content in sent if kind not in ("status", "execute_input")]
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_notebooks_display_follows_the_steps_and_ends_empty():
    (kind, first), *updates = cell(IN_A_CELL, somebody_looks=True)
    assert kind == "display_data" and {kind for kind, _ in updates} == {"update_display_data"}
    assert {content["transient"]["display_id"] for _, content in updates} == {first["transient"]["display_id"]}
    *texts, last = [content["data"] for _, content in updates]
    assert last == {} and any(re.match(r"step \d of 6, loss [\d.]+, ", text["text/plain"]) for text in texts)
    assert cell(IN_A_CELL, somebody_looks=False) == []


@pytest.mark.slow
def test_a_kernel_without_widgets_isnt_warned_of_bars():
    """The control says what tqdm does by itself."""
    if subprocess.run([sys.executable, "-c", "import ipywidgets"], capture_output=True).returncode == 0:
        pytest.skip("ipywidgets is installed, so tqdm has nothing to warn of")
    assert cell(BARS.format(first=""), True) == [("stream", {"name": "stdout", "text": "warns of IProgress\n"})]
    assert cell(BARS.format(first="from pplab import lab\nlab.models.gpt"), True) == []
