"""A process next to every pool. It ends the ranks and removes what they share, once the pool asks
for it or is gone itself.

Signals to the pool's group and a closed terminal don't reach this process, and it can end ranks
that react to nothing because they are stopped or in C code. It starts without torch, in
milliseconds: `python -I -S guard.py OWNER FOLDER TEMPORARY`.
"""

import os
import select
import shutil
import signal
import struct
import sys
from contextlib import suppress

# On the line: a rank's process number; 0: end; negative: end this one if the owner was killed.
PID = struct.Struct("i")
END_S = 5.0  # a killed process takes no longer, but for one that the kernel holds


def main(owner: int, folder: str, temporary: str) -> None:
    """Listen to the pool on stdin until told to end, or until the owner, which is the pool's
    process, has ended.

    `temporary` is a folder that the owner's multiprocessing leaves behind if it is killed.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(0, False)
    owner_handle, handles, numbers, ended = [], {}, None, False
    with suppress(ProcessLookupError):
        owner_handle = _handle(owner)
    while 0 not in handles and numbers != b"" and not ended:
        # Once it has ended, what is read is all that it wrote: a fork may hold the line open.
        ended = os.getppid() != owner
        if not ended:
            select.select([0, *owner_handle], [], [], None if owner_handle else 1.0)
        numbers = None
        with suppress(BlockingIOError):
            numbers = os.read(0, PID.size * 2**14)
        for (pid,) in PID.iter_unpack(numbers or b""):
            with suppress(ProcessLookupError):
                handles[pid] = _handle(abs(pid)) if pid else []
    if handles.pop(0, None) is None:  # a process that is killed closes its files, and then ends
        select.select(owner_handle, [], [], 1.0)
    ended = os.getppid() != owner
    handles = {pid: handle for pid, handle in handles.items() if pid > 0 or ended}
    for pid, handle in handles.items():
        with suppress(ProcessLookupError):
            if handle:
                signal.pidfd_send_signal(handle[0], signal.SIGKILL)
            else:
                os.kill(abs(pid), signal.SIGKILL)
    for handle in handles.values():
        select.select(handle, [], [], END_S if handle else 0)  # nobody writes into the folder then
    shutil.rmtree(folder, ignore_errors=True)
    if ended:
        shutil.rmtree(temporary, ignore_errors=True)


def _handle(pid: int) -> list[int]:
    """A list with a handle for a process that stays valid even when its number is given to a
    different one. It is empty on systems without such handles.
    """
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return []


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
