"""Enforcement of a policy on the calling process, irrevocably and inherited by what it executes.

Linux: Landlock for files, TCP ports, signals and abstract sockets; seccomp for what Landlock (ABI 7) lets through: UDP,
MPTCP, Fast Open, Unix sockets by path, metadata of files, limits and memory of other processes. macOS: a Seatbelt
profile. Standard library only: the launcher runs it under `-I -S`, and a start waits for it (2.7 ms of it for ctypes).

A policy is a dict of lists: `execute` and `libraries` (the engine's own files, resolved at the moment of the start),
`read` and `write` (checked before; each must still be its own real path), `list` (names in a directory only),
`bind` (TCP ports), and on macOS `profile` with `parameters`. With `pulls`, every address is open.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys

LEAST_ABI = 6  # TCP ports since 4, signals and abstract sockets since 6
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
RULE_PATH = 1
RULE_PORT = 2
EXECUTE = 1
WRITE_FILE = 2
READ_FILE = 4
READ_DIR = 8
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_FIFO = 1 << 10
MAKE_SYM = 1 << 12
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
ALL_FILES = (1 << 16) - 1
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READ = READ_FILE | READ_DIR
WRITE = READ | WRITE_FILE | TRUNCATE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER
BIND_TCP = 1
CONNECT_TCP = 2
SCOPES = 3  # abstract Unix sockets, signals
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

SYSTEM_READS = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/dev/urandom",
)
"""System files that programs read on Linux while they start. No user's files are among them."""
NETWORK_READS = (
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/services",
    "/etc/ssl",
    "/etc/pki",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
)
"""System files by which names are resolved and certificates checked."""
BACKEND = "libggml-"
"""First part of the name of each of ggml's backends."""
LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-musl-x86_64.so.1")

# x86-64 system calls refused to every engine; the line above each group is the reason.
REFUSED = (
    # metadata of files, which Landlock does not govern: chown, times, extended attributes; and chmod
    92,
    93,
    94,
    260,
    132,
    235,
    261,
    280,
    188,
    189,
    190,
    197,
    198,
    199,
    463,
    466,
    469,
    # other processes: ptrace, process_vm_*, process_madvise, kcmp, pidfd_getfd, migrate_pages, move_pages, ioprio_set,
    # sched_setparam, sched_setscheduler, sched_setattr
    101,
    310,
    311,
    440,
    312,
    438,
    256,
    279,
    251,
    142,
    144,
    314,
    # session and group, by which the launcher finds what an engine leaves behind: setpgid, setsid
    109,
    112,
    # the kernel's own: perf, bpf, userfaultfd, keys, modules, kexec, reboot, swap, accounting, quota, syslog
    298,
    321,
    323,
    248,
    249,
    250,
    175,
    313,
    176,
    246,
    320,
    169,
    167,
    168,
    163,
    179,
    443,
    103,
    # names and mounts: mount family, pivot_root, chroot, unshare, setns, open_by_handle_at, mknod, host name
    165,
    166,
    155,
    161,
    272,
    308,
    304,
    133,
    259,
    428,
    429,
    430,
    431,
    432,
    433,
    442,
    467,
    170,
    171,
    # clocks
    164,
    227,
    305,
    159,
    # what processes share without a file: System V memory, semaphores and messages, POSIX message queues
    29,
    30,
    31,
    67,
    64,
    65,
    66,
    220,
    68,
    69,
    70,
    71,
    240,
    241,
    242,
    243,
    244,
    245,
    # watches, which would reveal the names of files that cannot be listed: inotify, fanotify
    254,
    300,
    301,
)
CHMOD = (90, 91, 268, 452)
"""Refused too; to a program that would fail without it, success is pretended instead."""
ABSENT = (425, 426, 427, 435)  # io_uring, which bypasses seccomp; clone3, whose flags it cannot see
LAST_JUDGED = 469
"""Highest system call known here. Later ones are answered as by a kernel without them."""
SOCKET = 41
SENDTO = 44
SENDMSG = 46
SENDMMSG = 307
CLONE = 56
SETPRIORITY = 141
PRLIMIT = 302
SOCKETPAIR = 53
"""Also makes a Unix socket. A pair of datagram sockets sends to any path; a pair of streams stays connected."""
SETSOCKOPT = 54
"""Its option TCP_ULP can turn a TCP socket into one of SMC, whose connections Landlock does not see."""
TCP_ULP = 31
"""Number of that option; no other protocol has one of this number that an engine sets."""
FASTOPEN = 0x20000000
NAMESPACES = 0x7E020080
ARCH_X86_64 = 0xC000003E
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
MISSING = 0x00050000 | errno.ENOSYS
PRETEND = 0x00050000
LOAD = 0x20
EQUAL = 0x15
GREATER = 0x25
SET = 0x45
AND = 0x54
RETURN = 0x06  # words of classic BPF


class ConfinementError(RuntimeError):
    """The policy cannot be enforced here; the message says why."""


# ── seccomp ──────────────────────────────────────────────────────────────────────────────────────


def _argument(number: int) -> int:
    """Offset of the low half of a call's argument in `seccomp_data`, the filter's input."""
    return 16 + 8 * number


def seccomp_filter(pulls: bool = False) -> list[tuple[int, int, int, int]]:
    """The filter as (code, jump if true, jump if false, value)."""

    def only(call: int, argument: int, mask: int, allowed: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        """Refuse a call unless the masked argument is one of `allowed`; otherwise continue after this block."""
        tests = [(EQUAL, len(allowed) - index, 0, value) for index, value in enumerate(allowed)]
        body = [(LOAD, 0, 0, _argument(argument)), (AND, 0, 0, mask), *tests, (RETURN, 0, 0, REFUSE)]
        return [(LOAD, 0, 0, 0), (EQUAL, 0, len(body), call), *body]

    def unless(call: int, argument: int, value: int, test: int = SET) -> list[tuple[int, int, int, int]]:
        """Refuse a call whose argument has any of the bits of a value, or equals it."""
        body = [(LOAD, 0, 0, _argument(argument)), (test, 0, 1, value), (RETURN, 0, 0, REFUSE)]
        return [(LOAD, 0, 0, 0), (EQUAL, 0, len(body), call), *body]

    program = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, ARCH_X86_64),
        (RETURN, 0, 0, MISSING),
        (LOAD, 0, 0, 0),
        (GREATER, 0, 1, LAST_JUDGED),
        (RETURN, 0, 0, MISSING),  # x32 calls are above it as well
    ]
    types, protocols = ((1, 2), (0, 6, 17)) if pulls else ((1,), (0, 6))  # name resolution takes UDP
    program += only(SOCKET, 0, 0xFFFFFFFF, (2, 10)) + only(SOCKET, 1, 0xF, types)
    program += only(SOCKET, 2, 0xFFFFFFFF, protocols)
    program += only(SOCKETPAIR, 0, 0xFFFFFFFF, (1,)) + only(SOCKETPAIR, 1, 0xF, (1,))
    program += unless(SENDTO, 3, FASTOPEN) + unless(SENDMSG, 2, FASTOPEN) + unless(SENDMMSG, 3, FASTOPEN)
    program += unless(SETSOCKOPT, 2, TCP_ULP, EQUAL) + unless(CLONE, 0, NAMESPACES)
    program += only(SETPRIORITY, 0, 0xFFFFFFFF, (0,)) + only(SETPRIORITY, 1, 0xFFFFFFFF, (0,))
    program += only(PRLIMIT, 0, 0xFFFFFFFF, (0,))
    program.append((LOAD, 0, 0, 0))
    for answer, calls in ((MISSING, ABSENT), (REFUSE, REFUSED), (PRETEND if pulls else REFUSE, CHMOD)):
        for call in calls:
            program += [(EQUAL, 0, 1, call), (RETURN, 0, 0, answer)]
    return [*program, (RETURN, 0, 0, ALLOW)]


# ── Landlock ─────────────────────────────────────────────────────────────────────────────────────


def landlock_abi() -> int:
    """Version of the kernel's Landlock, 0 where there is none."""
    found = ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return max(0, int(found))


def _call(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    result = int(library.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise ConfinementError(f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


class Ruleset:
    """A Landlock ruleset that is not in force yet."""

    def __init__(self, pulls: bool) -> None:
        self._pulls, abi = pulls, landlock_abi()
        if os.uname().machine != "x86_64" or abi < LEAST_ABI:
            kernel = f"Landlock ABI {abi} on {os.uname().machine}"
            raise ConfinementError(f"{kernel}: engines are confined from ABI {LEAST_ABI} (Linux 6.12) on, on x86_64")
        head = struct.pack("=QQQ", ALL_FILES, 0 if pulls else BIND_TCP | CONNECT_TCP, SCOPES)
        self._fd = _call(CREATE_RULESET, head, ctypes.c_size_t(len(head)), 0)

    def path(self, path: str, rights: int, judged: bool) -> None:
        """Grant rights below a path. A `judged` path must still be its own real path.

        Raises ConfinementError. Paths that do not exist are skipped: of a daemon's models, one may be gone.
        """
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            if judged and not isinstance(error, FileNotFoundError):
                raise ConfinementError(f"{path!r}: {error.strerror}") from None
            return
        try:
            if judged and os.readlink(f"/proc/self/fd/{fd}") != path:
                raise ConfinementError(f"{path!r} has become a link to another place since it was judged")
            if not os.path.isdir(f"/proc/self/fd/{fd}"):
                rights &= OF_A_FILE
            _call(ADD_RULE, self._fd, RULE_PATH, struct.pack("=Qi", rights, fd), 0)
        finally:
            os.close(fd)

    def port(self, port: int) -> None:
        """Allow to listen on one TCP port."""
        _call(ADD_RULE, self._fd, RULE_PORT, struct.pack("=QQ", BIND_TCP, port), 0)

    def restrict(self) -> None:
        """Enforce the ruleset and the system call filter on this process."""
        _dump_nothing()
        library = ctypes.CDLL(None, use_errno=True)
        program = b"".join(struct.pack("=HBBI", *each) for each in seccomp_filter(self._pulls))
        area = ctypes.create_string_buffer(program, len(program))
        head = struct.pack("@HP", len(program) // 8, ctypes.addressof(area))
        zero = ctypes.c_ulong(0)
        if library.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero):
            raise ConfinementError(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
        _call(RESTRICT_SELF, self._fd, 0)
        os.close(self._fd)
        if library.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), head, zero, zero):
            raise ConfinementError(f"seccomp: {os.strerror(ctypes.get_errno())}")


def _texts(policy: dict[str, object], name: str) -> list[str]:
    found = policy.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, str) and each.startswith("/") for each in found):
        raise ConfinementError(f"policy: {name} must be a list of absolute paths")
    return found


def _ports(policy: dict[str, object]) -> list[int]:
    found = policy.get("bind", [])
    if not isinstance(found, list) or not all(type(each) is int and 0 < each < 65536 for each in found):
        raise ConfinementError("policy: bind must be a list of ports")
    return found


def _prepare_linux(policy: dict[str, object]) -> Ruleset:
    pulls = policy.get("pulls") is True
    rules = Ruleset(pulls)
    for path in (*_texts(policy, "execute"), *LOADERS):
        rules.path(path, EXECUTE | READ_FILE, judged=False)
    for path in (*_texts(policy, "libraries"), *SYSTEM_READS, *(NETWORK_READS if pulls else ())):
        rules.path(path, READ, judged=False)
    # ggml looks for its backends by listing their directory, which is not among `libraries` if others' files are in it.
    for place, name in map(os.path.split, _texts(policy, "libraries")):
        if name.startswith(BACKEND):
            rules.path(place, READ_DIR, judged=False)
    rules.path("/dev/null", READ_FILE | WRITE_FILE, judged=False)
    for path in _texts(policy, "list"):
        rules.path(path, READ_DIR, judged=False)
    for path in _texts(policy, "read"):
        rules.path(path, READ, judged=True)
    for path in _texts(policy, "write"):
        os.makedirs(path, 0o700, exist_ok=True)
        rules.path(path, WRITE, judged=True)
    for port in () if pulls else _ports(policy):
        rules.port(port)
    return rules


# ── macOS ────────────────────────────────────────────────────────────────────────────────────────


def _as_stored(path: str) -> str:
    """A path as the disk has it: Seatbelt compares letters, and APFS finds a file in another case or Unicode form too.

    One that leads elsewhere by now stays as it was judged.
    """
    get_path = getattr(fcntl, "F_GETPATH", None)
    if get_path is None or not path.startswith("/"):
        return path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return path  # not there, or closed to this user: the engine's to report
    try:
        stored = os.fsdecode(fcntl.fcntl(descriptor, get_path, bytes(1024)).rstrip(b"\0"))
    except OSError:
        return path
    finally:
        os.close(descriptor)
    return stored if _folded(stored) == _folded(path) else path


def _folded(path: str) -> str:
    import unicodedata  # a start waits for it, and needs it on a Mac alone

    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())


class Profile:
    """A Seatbelt profile that is not in force yet. Paths are parameters, never part of its text."""

    def __init__(self, text: str, parameters: dict[str, str], resolved: dict[str, str]) -> None:
        """`resolved`: parameters that name the engine's own files, which an upgrade of it may have moved."""
        self._text = text
        values = {**parameters, **{name: os.path.realpath(path) for name, path in resolved.items()}}
        for name, path in parameters.items():
            if path.startswith("/") and os.path.realpath(path) != path:
                raise ConfinementError(f"{path!r} ({name}) has become a link to another place since it was judged")
        self._values = [part.encode() for name in sorted(values) for part in (name, _as_stored(values[name]))]

    def restrict(self) -> None:
        """Enforce the profile on this process. Raises ConfinementError with Seatbelt's message."""
        _dump_nothing()
        function = ctypes.CDLL("/usr/lib/libsandbox.1.dylib").sandbox_init_with_parameters
        function.argtypes = [
            ctypes.c_char_p,
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_char_p),
            ctypes.POINTER(ctypes.c_char_p),
        ]
        function.restype = ctypes.c_int
        values = (ctypes.c_char_p * (len(self._values) + 1))(*self._values, None)
        error = ctypes.c_char_p()
        if function(self._text.encode(), 0, values, ctypes.byref(error)):
            said = (error.value or b"no reason given").decode("utf-8", "replace")
            raise ConfinementError(f"Seatbelt: {said:.300}")


def _dump_nothing() -> None:
    """Keep a crash from writing the engine's memory, with prompts in it and as large as its model, to a file."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _parameters(policy: dict[str, object], name: str) -> dict[str, str]:
    found = policy.get(name)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ConfinementError(f"policy: {name} must be texts by name")
    return found


def _prepare_darwin(policy: dict[str, object]) -> Profile:
    text, parameters = policy.get("profile"), _parameters(policy, "parameters")
    if not isinstance(text, str):
        raise ConfinementError("policy: no Seatbelt profile")
    for name, path in parameters.items():
        if name.startswith("WRITE_"):
            os.makedirs(path, 0o700, exist_ok=True)
    return Profile(text, parameters, _parameters(policy, "resolved"))


def prepare(policy: dict[str, object]) -> Ruleset | Profile:
    """The ruleset or profile of a policy, not yet in force. Its `restrict` is the last step before `execve`.

    As much as possible of what may fail is done here. Raises ConfinementError.
    """
    if sys.platform == "darwin":
        return _prepare_darwin(policy)
    return _prepare_linux(policy)
