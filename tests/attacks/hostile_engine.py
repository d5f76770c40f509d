"""A program in the place of an engine that tries to get out; prints what each attempt came to, as JSON.

Run by the real launcher, with what `World` of test_confinement.py laid out in argv[1] (JSON). An attempt is a function
that succeeds by returning; the errno or the exception that stopped it is what is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import resource
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


SCRATCH = WORLD["scratch"]
SECRET = WORLD["secret"]

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
def dump_its_memory() -> object:
    if not resource.getrlimit(resource.RLIMIT_CORE)[1]:
        raise PermissionError(1, "no core may be dumped")
    return True


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
def turn_tcp_into_smc() -> object:
    with socket.socket() as client:
        client.setsockopt(6, 31, b"smc")  # TCP_ULP
        return client.connect((LOCAL, WORLD["sibling_port"]))


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


def datagram(kind: int, send: Callable[[socket.socket], object]) -> object:
    """Send to a socket by its path from one end of a pair, which needs no `socket` call."""
    pair = socket.socketpair(socket.AF_UNIX, kind)
    try:
        return send(pair[0])
    finally:
        for end in pair:
            end.close()


def send_many(end: socket.socket) -> object:
    name = ctypes.create_string_buffer(struct.pack("=H", 1) + WORLD["doorbell"].encode() + b"\0")
    part = ctypes.create_string_buffer(struct.pack("@PN", ctypes.addressof(name), 1))
    addresses = ctypes.addressof(name), len(name), ctypes.addressof(part)
    head = struct.pack("@PIxxxxPNPNixxxxIxxxx", *addresses, 1, 0, 0, 0, 0)
    return call(307, end.fileno(), head, 1, 0)


DATAGRAM_BY_A_PAIR: dict[str, tuple[int, Callable[[socket.socket], object]]] = {
    "datagram_by_a_pair": (2, lambda end: end.sendto(b"x", WORLD["doorbell"])),
    "datagram_by_a_pair_with_flags": (2 | 0o2004000, lambda end: end.sendto(b"x", WORLD["doorbell"])),
    "datagram_by_a_raw_pair": (3, lambda end: end.sendto(b"x", WORLD["doorbell"])),  # Linux makes it a datagram pair
    "datagram_by_a_pair_and_sendmsg": (2, lambda end: end.sendmsg([b"x"], [], 0, WORLD["doorbell"])),
    "datagram_by_a_pair_and_sendmmsg": (2, send_many),
    "datagram_by_a_pair_that_connects": (2, lambda end: (end.connect(WORLD["doorbell"]), end.send(b"x"))),
    "pair_of_seqpackets": (5, lambda end: end.send(b"x")),
}
for name, (kind, send) in DATAGRAM_BY_A_PAIR.items():
    ATTEMPTS[name] = lambda kind=kind, send=send: datagram(kind, send)


@attempt
def send_to_a_path_by_a_pair_of_streams() -> object:
    return datagram(1, lambda end: end.sendto(b"x", WORLD["unix"]))


@attempt
def connect_a_pair_of_streams_to_a_path() -> object:
    return datagram(1, lambda end: end.connect(WORLD["unix"]))


@attempt
def connect_a_lone_end_of_a_pair_to_a_path() -> object:
    ends = socket.socketpair()
    ends[1].close()
    with ends[0] as end:
        with contextlib.suppress(OSError):
            call(42, end.fileno(), struct.pack("=H", 0) + bytes(14), 16)  # AF_UNSPEC dissolves other connections
        end.connect(WORLD["unix"])
    return True


@attempt
def pair_of_another_family() -> object:
    return call(53, 30, 1, 0, ctypes.create_string_buffer(8))  # AF_TIPC has pairs too


@attempt
def socket_of_the_32_bit_interface() -> object:
    """Make a datagram socket by `int 0x80`, in a child: without that interface, it is ended by a signal."""
    number, family, kind = (struct.pack("=I", each) for each in (359, 1, 2))
    code = b"\x53\xb8" + number + b"\xbb" + family + b"\xb9" + kind + b"\x31\xd2\xcd\x80\x5b\x48\x98\xc3"
    child = os.fork()
    if not child:
        area = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        area.write(code)
        result = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(area)))()
        os._exit(0 if result >= 0 else min(-result, 255))
    if ended := os.waitpid(child, 0)[1]:
        raise OSError(os.waitstatus_to_exitcode(ended), "int 0x80")
    return True


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
    ("io_uring", 425, (8, bytes(120))),
    ("io_uring_enter", 426, (-1, 0, 0, 0, None, 0)),
    ("io_uring_register", 427, (-1, 0, None, 0)),
    ("bpf", 321, (0, bytes(64), 64)),
    ("user_namespace", 272, (0x10000000,)),
    ("clone_into_a_namespace", 56, (0x10000000 | 17, None, None, None, None)),
    ("keys", 250, (0, -3, 0)),
    ("mount", 165, (b"none", SCRATCH.encode(), b"tmpfs", 0, None)),
    ("shared_memory", 29, (0x1234, 4096, 0o1600)),
    ("message_queue", 240, (b"attack", 0o102, 0o600, None)),
    ("userfaultfd", 323, (0,)),
    ("handle_of_a_file", 304, (-100, bytes(128), 0)),
    ("performance_events", 298, (bytes(128), 0, -1, -1, 0)),
    ("a_call_of_the_x32_interface", 0x40000000 | 39, ()),
    ("socket_of_the_x32_interface", 0x40000000 | 41, (1, 2, 0)),
    ("pair_of_the_x32_interface", 0x40000000 | 53, (1, 2, 0, bytes(8))),
    ("a_call_nobody_has_judged", 470, ()),
    ("host_name", 170, (b"x", 1)),
    ("module", 313, (0, b"", 0)),
):
    ATTEMPTS[name] = lambda number=number, arguments=arguments: call(number, *arguments)


def in_a_child(action: Callable[[], object]) -> object:
    """Do what would change this process for the attempts that follow."""
    child = os.fork()
    if not child:
        try:
            action()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(code, os.strerror(code))
    return True


IN_A_CHILD: dict[str, Callable[[], object]] = {
    "chroot": lambda: os.chroot(SCRATCH),
    "leave_its_session": os.setsid,
    "lead_a_group": lambda: os.setpgid(0, 0),
    "join_the_group_of_a_sibling": lambda: os.setpgid(0, os.getpgid(SIBLING)),
    "enter_a_namespace": lambda: call(308, os.open("/proc/self/ns/pid", os.O_RDONLY), 0),
    "clone_into_a_pid_namespace": lambda: call(56, 0x20000000 | 17, None, None, None, None),
}
for name, action in IN_A_CHILD.items():
    ATTEMPTS[name] = lambda action=action: in_a_child(action)


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
    flags = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    return [each.close() for each in (*socket.socketpair(), *socket.socketpair(type=socket.SOCK_STREAM | flags))]


@attempt
def own_event_loop() -> object:
    return asyncio.run(asyncio.sleep(0, True))


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
