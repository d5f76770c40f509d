"""A program in the place of an engine that tries to get out; prints what each attempt came to, as JSON.

Run by the real launcher, with what `World` of test_confinement.py laid out in argv[1] (JSON). An attempt is a function
that succeeds by returning; the errno or the exception that stopped it is what is told.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable

WORLD = json.loads(sys.argv[1])
LIBC = ctypes.CDLL(None, use_errno=True)
ATTEMPTS: dict[str, Callable[[], object]] = {}


def attempt(function: Callable[[], object]) -> Callable[[], object]:
    ATTEMPTS[function.__name__] = function
    return function


def call(number: int, *arguments: object) -> int:
    result = LIBC.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        found = file.read(64)
    if not found:
        raise ValueError("empty")
    return found


SCRATCH, SECRET = WORLD["scratch"], WORLD["secret"]

# ── files ────────────────────────────────────────────────────────────────────────────────────────

for name in ("secret", "sibling_model", "sibling_spec", "ssh_key", "passwd", "supervisord_conf"):
    ATTEMPTS[f"read_{name}"] = lambda path=WORLD[name]: read(path)


@attempt
def list_the_state_directory() -> object:
    return os.listdir(WORLD["state"])


@attempt
def read_by_a_link_of_its_own() -> object:
    os.symlink(SECRET, f"{SCRATCH}/link")
    return read(f"{SCRATCH}/link")


@attempt
def read_by_a_link_in_the_middle() -> object:
    os.symlink(os.path.dirname(SECRET), f"{SCRATCH}/directory")
    return read(f"{SCRATCH}/directory/{os.path.basename(SECRET)}")


@attempt
def hard_link() -> object:
    os.link(SECRET, f"{SCRATCH}/hard")
    return read(f"{SCRATCH}/hard")


@attempt
def move_it_into_scratch() -> object:
    return os.rename(WORLD["movable"], f"{SCRATCH}/moved")


@attempt
def exchange_with_a_file_of_its_own() -> object:
    with open(f"{SCRATCH}/mine", "w") as file:
        file.write("x")
    theirs, mine = WORLD["exchanged"].encode(), f"{SCRATCH}/mine".encode()
    return call(316, -100, theirs, -100, mine, 2)  # renameat2, RENAME_EXCHANGE


@attempt
def truncate() -> object:
    return os.truncate(WORLD["victim"], 0)


@attempt
def append() -> object:
    with open(WORLD["victim"], "a") as file:
        file.write("x")
    return True


@attempt
def unlink() -> object:
    return os.unlink(WORLD["victim"])


@attempt
def overwrite_its_model() -> object:
    with open(WORLD["model"], "r+b") as file:
        file.write(b"x")
    return True


@attempt
def add_a_launch_agent() -> object:
    with open(f"{WORLD['agents']}/evil.plist", "w") as file:
        file.write("x")
    return True


@attempt
def add_a_section() -> object:
    with open(f"{WORLD['state']}/models.d/evil.conf", "w") as file:
        file.write("[program:evil]\ncommand=/bin/true\n")
    return True


@attempt
def replace_the_launcher() -> object:
    with open(f"{WORLD['state']}/current/launch.py", "w") as file:
        file.write("x")
    return True


@attempt
def make_a_directory_outside() -> object:
    return os.mkdir(f"{WORLD['state']}/mine")


@attempt
def chmod_a_secret() -> object:
    return os.chmod(SECRET, 0o644)


@attempt
def fchmodat2_a_secret() -> object:
    return call(452, -100, SECRET.encode(), 0o644, 0)


@attempt
def chown_a_secret() -> object:
    return os.chown(SECRET, os.getuid(), os.getgid())


@attempt
def set_the_time_of_a_secret() -> object:
    return os.utime(SECRET, (0, 0))


@attempt
def set_an_attribute_of_a_secret() -> object:
    return os.setxattr(SECRET, "user.x", b"1")


@attempt
def open_by_path_and_reopen() -> object:
    fd = os.open(SECRET, os.O_PATH)
    return read(f"/proc/self/fd/{fd}")


@attempt
def through_the_root_of_init() -> object:
    return read(f"/proc/{WORLD['sibling_pid']}/root{SECRET}")


@attempt
def through_its_own_root() -> object:
    return read(f"/proc/self/root{SECRET}")


@attempt
def environment_of_a_sibling() -> object:
    return read(f"/proc/{WORLD['sibling_pid']}/environ")


@attempt
def memory_of_a_sibling() -> object:
    with open(f"/proc/{WORLD['sibling_pid']}/mem", "rb") as file:
        return file.fileno()


@attempt
def arguments_of_a_sibling() -> object:
    return read(f"/proc/{WORLD['sibling_pid']}/cmdline")


@attempt
def watch_a_directory() -> object:
    return call(254, call(294, 0), WORLD["state"].encode(), 0x100)


@attempt
def shared_memory_file() -> object:
    with open("/dev/shm/metal-attack", "w") as file:
        file.write("x")
    return True


# ── programs ─────────────────────────────────────────────────────────────────────────────────────


def execute(*argv: str) -> object:
    child = os.fork()
    if not child:
        try:
            os.execv(argv[0], list(argv))
        except OSError as error:
            os._exit(100 + min(error.errno or 0, 100))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code - 100 if code > 100 else 13, f"exit {code}")
    return code


@attempt
def run_a_shell() -> object:
    return execute("/bin/sh", "-c", "true")


@attempt
def run_a_program_of_its_own() -> object:
    with open(f"{SCRATCH}/program", "wb") as file:
        file.write(b"#!/bin/sh\ntrue\n")
    os.chmod(f"{SCRATCH}/program", 0o700)
    return execute(f"{SCRATCH}/program")


@attempt
def run_by_the_loader() -> object:
    return execute("/lib64/ld-linux-x86-64.so.2", "/bin/true")


# ── the network ──────────────────────────────────────────────────────────────────────────────────


def connect(family: int, kind: int, protocol: int, address: object) -> object:
    with socket.socket(family, kind, protocol) as client:
        client.settimeout(2)
        client.connect(address)  # type: ignore[arg-type]
    return True


LOCAL = "127.0.0.1"
for name in ("sibling_port", "api_port"):
    ATTEMPTS[f"connect_to_{name}"] = lambda port=WORLD[name]: connect(2, 1, 0, (LOCAL, port))


@attempt
def connect_outward() -> object:
    return connect(2, 1, 0, (WORLD["outside"], WORLD["sibling_port"]))


@attempt
def connect_over_ipv6() -> object:
    return connect(10, 1, 0, (f"::ffff:{LOCAL}", WORLD["sibling_port"]))


@attempt
def connect_over_mptcp() -> object:
    return connect(2, 1, 262, (LOCAL, WORLD["sibling_port"]))


@attempt
def connect_over_sctp() -> object:
    return connect(2, 1, 132, (LOCAL, WORLD["sibling_port"]))


@attempt
def fast_open() -> object:
    with socket.socket() as client:
        return client.sendto(b"x", 0x20000000, (LOCAL, WORLD["sibling_port"]))


@attempt
def fast_open_by_sendmsg() -> object:
    with socket.socket() as client:
        return client.sendmsg([b"x"], [], 0x20000000, (LOCAL, WORLD["sibling_port"]))


@attempt
def fast_open_by_an_option() -> object:
    with socket.socket() as client:
        client.setsockopt(6, 30, 1)  # TCP_FASTOPEN_CONNECT
        client.connect((LOCAL, WORLD["sibling_port"]))
        return client.send(b"x")


@attempt
def listen_on_another_port() -> object:
    return socket.create_server((LOCAL, WORLD["free_port"])).close()


@attempt
def listen_over_mptcp() -> object:
    with socket.socket(2, 1, 262) as server:
        server.bind((LOCAL, WORLD["free_port"]))
        return server.listen()


@attempt
def send_udp() -> object:
    with socket.socket(2, 2) as client:
        return client.sendto(b"x", (LOCAL, WORLD["udp_port"]))


@attempt
def raw_socket() -> object:
    return socket.socket(2, 3, 1).close()


@attempt
def netlink() -> object:
    return socket.socket(16, 3, 0).close()


@attempt
def vsock() -> object:
    return socket.socket(40, 1, 0).close()


@attempt
def packet_socket() -> object:
    return socket.socket(17, 3, 0).close()


@attempt
def socket_of_supervisord() -> object:
    return connect(1, 1, 0, WORLD["unix"])


@attempt
def abstract_socket() -> object:
    return connect(1, 1, 0, b"\0" + WORLD["abstract"].encode())


@attempt
def datagram_to_the_doorbell() -> object:
    with socket.socket(1, 2) as client:
        return client.sendto(b"x", WORLD["doorbell"])


# ── other processes, and the kernel ──────────────────────────────────────────────────────────────

SIBLING = WORLD["sibling_pid"]


@attempt
def kill_a_sibling() -> object:
    return os.kill(SIBLING, signal.SIGCONT)


@attempt
def ask_whether_a_sibling_can_be_signalled() -> object:
    return os.kill(SIBLING, 0)


@attempt
def kill_the_parent() -> object:
    return os.kill(os.getppid(), 0)


@attempt
def kill_by_pidfd() -> object:
    return signal.pidfd_send_signal(os.pidfd_open(SIBLING), signal.SIGCONT)


@attempt
def queue_a_signal() -> object:
    information = struct.pack("=iii", signal.SIGCONT, 0, -1) + bytes(116)
    return call(129, SIBLING, signal.SIGCONT, information)  # rt_sigqueueinfo


@attempt
def ptrace() -> object:
    return call(101, 16, SIBLING, 0, 0)


@attempt
def read_its_memory() -> object:
    area = ctypes.create_string_buffer(8)
    here, there = (struct.pack("@PN", address, 8) for address in (ctypes.addressof(area), WORLD["sibling_address"]))
    return call(310, SIBLING, here, ctypes.c_ulong(1), there, ctypes.c_ulong(1), ctypes.c_ulong(0))


@attempt
def take_a_descriptor() -> object:
    return call(438, os.pidfd_open(SIBLING), 0, 0)


@attempt
def limit_another() -> object:
    return call(302, SIBLING, 7, None, ctypes.create_string_buffer(16))


@attempt
def renice_another() -> object:
    return os.setpriority(os.PRIO_PROCESS, SIBLING, 10)


@attempt
def renice_all_of_a_user() -> object:
    return os.setpriority(os.PRIO_USER, 0, 10)


for name, number, arguments in (
    ("io_uring", 425, (8, bytes(120))), ("bpf", 321, (0, bytes(64), 64)), ("user_namespace", 272, (0x10000000,)),
    ("clone_into_a_namespace", 56, (0x10000000 | 17, None, None, None, None)), ("keys", 250, (0, -3, 0)),
    ("mount", 165, (b"none", SCRATCH.encode(), b"tmpfs", 0, None)),
    ("shared_memory", 29, (0x1234, 4096, 0o1600)), ("message_queue", 240, (b"attack", 0o102, 0o600, None)),
    ("userfaultfd", 323, (0,)), ("handle_of_a_file", 304, (-100, bytes(128), 0)),
    ("performance_events", 298, (bytes(128), 0, -1, -1, 0)), ("a_call_of_the_x32_interface", 0x40000000 | 39, ()),
    ("a_call_nobody_has_judged", 470, ()), ("host_name", 170, (b"x", 1)), ("module", 313, (0, b"", 0)),
):
    ATTEMPTS[name] = lambda number=number, arguments=arguments: call(number, *arguments)


@attempt
def chroot() -> object:
    child = os.fork()
    if not child:
        try:
            os.chroot(SCRATCH)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(code, os.strerror(code))
    return True


# ── what an engine needs, and what is not held ───────────────────────────────────────────────────


@attempt
def own_read_its_model() -> object:
    return read(WORLD["model"])


@attempt
def own_write_scratch() -> object:
    with open(f"{SCRATCH}/own", "w") as file:
        return file.write("x")


@attempt
def own_listen() -> object:
    return socket.create_server((LOCAL, WORLD["port"])).close()


@attempt
def own_end_a_child() -> object:
    child = os.fork()
    if not child:
        signal.pause()
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)


@attempt
def own_pair_of_sockets() -> object:
    return [each.close() for each in socket.socketpair()]


@attempt
def open_see_that_a_file_is_there() -> object:
    return os.stat(SECRET).st_size


@attempt
def open_listen_on_a_port_that_the_system_chooses() -> object:
    with socket.socket() as server:
        return server.listen()


@attempt
def open_move_another_to_a_core() -> object:
    return os.sched_setaffinity(SIBLING, os.sched_getaffinity(SIBLING))


@attempt
def open_run_a_program_in_memory() -> object:
    fd = os.memfd_create("x", 0)
    os.write(fd, b"#!" + os.fsencode(sys.executable) + b"\n")
    return execute(f"/proc/self/fd/{fd}")


def outcome(tried: Callable[[], object]) -> str:
    try:
        tried()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else repr(error)
    except Exception as error:  # noqa: BLE001  (whatever stopped it is the answer)
        return repr(error)
    return "worked"


print(json.dumps({name: outcome(tried) for name, tried in ATTEMPTS.items()}))
