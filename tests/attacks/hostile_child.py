"""A program in the place of an engine that ends at once and leaves a child on its port, hidden in the way of argv[1].

Run by the real launcher under the real policy. The child has no mark of its engine: its environment is empty or wiped.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time

WAY = sys.argv[1]
PORT = int(sys.argv[2])
SCRATCH = sys.argv[3]
LIBC = ctypes.CDLL(None)
PR_SET_CHILD_SUBREAPER = 36
CLONE = 56
CLONE_PARENT = 0x8000
SIGCHLD = 17
EXIT_OF_A_THREAD = 60
LASTS_S = 600


def wipe() -> None:
    """Overwrite the environment that /proc shows."""
    place = ctypes.cast(ctypes.c_void_p.in_dll(LIBC, "environ"), ctypes.POINTER(ctypes.c_void_p))
    index = 0
    while each := place[index]:
        ctypes.memset(each, ord("x"), len(ctypes.string_at(each)))
        index += 1


def stay() -> None:
    server = socket.create_server(("127.0.0.1", PORT))
    with open(f"{SCRATCH}/pid", "w") as file:
        file.write(str(os.getpid()))
    if WAY == "a_thread_alone":
        threading.Thread(target=lambda: time.sleep(LASTS_S)).start()
        LIBC.syscall(EXIT_OF_A_THREAD, 0)
    until = time.monotonic() + LASTS_S
    while WAY == "always_another" and time.monotonic() < until:
        if os.fork():
            os._exit(0)
    time.sleep(LASTS_S)
    server.close()


def fork() -> int:
    if WAY == "clone_parent":
        return int(LIBC.syscall(CLONE, CLONE_PARENT | SIGCHLD, None, None, None, None))
    return os.fork()


if WAY == "executed":
    stay()
if WAY == "double_fork":
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
if fork() == 0:
    if WAY == "double_fork" and fork():
        os._exit(0)
    with contextlib.suppress(OSError):
        os.setsid()  # as a daemon does; refused
    if WAY == "execve":
        os.execve(sys.executable, [sys.executable, "-I", __file__, "executed", str(PORT), SCRATCH], {})
    wipe()
    stay()
while not os.path.exists(f"{SCRATCH}/pid"):
    time.sleep(0.01)
os._exit(0)
