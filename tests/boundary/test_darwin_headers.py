"""Numbers, structures and signatures of macOS that the product uses, held against Apple's headers without a Mac.

Zig's compiler has those of libSystem. What they do not have (sysctl names) is listed with its
source in docs/mac-acceptance.md, and a check of the acceptance run names it.
"""

from __future__ import annotations

import ast
import ctypes
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor import launch
from metal_supervisor.cluster import kube
from metal_supervisor.confinement import enforce
from metal_supervisor.doctor import login
from metal_supervisor.host import darwin_memory, sleep_clock
from metal_supervisor.models import model_directory, places
from tests.support import kqueue, parts
from tests.support.system import ROOT

from tests.support.finders.find_zig import LINKED, TARGETS, command, environment, find  # isort: skip

PRODUCT = ROOT / "metal_supervisor"
ACCEPTANCE = ROOT / "docs" / "mac-acceptance.md"
HEADERS = (
    "errno.h",
    "fcntl.h",
    "libproc.h",
    "limits.h",
    "mach/machine.h",
    "netinet/tcp.h",
    "stddef.h",
    "stdint.h",
    "sys/event.h",
    "sys/proc_info.h",
    "sys/resource.h",
    "sys/sysctl.h",
    "time.h",
)

VALUES = {
    "launch.PROC_PIDTBSDINFO": (launch.PROC_PIDTBSDINFO, "PROC_PIDTBSDINFO"),
    "launch.PROC_BSDINFO_BYTES": (launch.PROC_BSDINFO_BYTES, "sizeof(struct proc_bsdinfo)"),
    "launch.STARTED_AT[0]": (launch.STARTED_AT[0], "offsetof(struct proc_bsdinfo, pbi_start_tvsec)"),
    "launch.STARTED_AT[1]": (launch.STARTED_AT[1], "offsetof(struct proc_bsdinfo, pbi_start_tvusec)"),
    "seconds of a start": (8, "sizeof(((struct proc_bsdinfo *)0)->pbi_start_tvsec)"),
    "microseconds of a start": (8, "sizeof(((struct proc_bsdinfo *)0)->pbi_start_tvusec)"),
    "launch.PROC_PGRP_ONLY": (launch.PROC_PGRP_ONLY, "PROC_PGRP_ONLY"),
    "launch.PROC_PPID_ONLY": (launch.PROC_PPID_ONLY, "PROC_PPID_ONLY"),
    "a pid": (ctypes.sizeof(ctypes.c_int), "sizeof(pid_t)"),
    "launch.CTL_KERN": (launch.CTL_KERN, "CTL_KERN"),
    "launch.KERN_PROCARGS2": (launch.KERN_PROCARGS2, "KERN_PROCARGS2"),
    "launch.PROCARGS_BYTES": (launch.PROCARGS_BYTES, "ARG_MAX"),
    "darwin_memory.RUSAGE_INFO_V4": (darwin_memory.RUSAGE_INFO_V4, "RUSAGE_INFO_V4"),
    "login.NO_ROUTE_ON_A_MAC": (login.NO_ROUTE_ON_A_MAC, "EHOSTUNREACH"),
    # The stand-in for kqueue has numbers of its own.
    "KQ_FILTER_PROC": (kqueue.KQ_FILTER_PROC, "EVFILT_PROC"),
    "KQ_NOTE_EXIT": (kqueue.KQ_NOTE_EXIT, "NOTE_EXIT"),
    "KQ_EV_ADD": (kqueue.KQ_EV_ADD, "EV_ADD"),
    "KQ_EV_DELETE": (kqueue.KQ_EV_DELETE, "EV_DELETE"),
    "KQ_EV_ONESHOT": (kqueue.KQ_EV_ONESHOT, "EV_ONESHOT"),
}
"""Python's expression -> its value, and the expression of C that must have the same."""

NAMES = {
    kube: {"TCP_KEEPALIVE", "TCP_KEEPINTVL", "TCP_KEEPCNT"},
    model_directory: {"F_FULLFSYNC"},
    enforce: {"F_GETPATH"},
    places: {"F_GETPATH"},
    sleep_clock: {"CLOCK_MONOTONIC_RAW", "CLOCK_UPTIME_RAW"},
}
"""Module -> names that Python's own modules have on a Mac, because its headers do."""

STRUCTURES = {
    darwin_memory.SwapUsage: (
        "struct xsw_usage",
        {name: f"xsu_{name}" for name in ("total", "avail", "used", "pagesize", "encrypted")},
    ),
    darwin_memory.RusageInfo: (
        "struct rusage_info_v4",
        {
            name: f"ri_{name}"
            for name in (
                "uuid",
                "user_time",
                "system_time",
                "pkg_idle_wkups",
                "interrupt_wkups",
                "pageins",
                "wired_size",
                "resident_size",
                "phys_footprint",
                "lifetime_max_phys_footprint",
            )
        },
    ),
}
"""Structure of ctypes -> that of C, and its fields; what fills up has no name there."""

FILLING = {"rest_of_v3", "rest"}
FUNCTIONS = {**launch.DARWIN, **darwin_memory.FUNCTIONS}
TYPES = {
    "c_int": "int",
    "c_uint": "unsigned",
    "c_uint32": "uint32_t",
    "c_uint64": "uint64_t",
    "c_size_t": "size_t",
    "c_void_p": "void *",
    "c_char_p": "char *",
}
OBJECT = "-c", "-o", "out.o"
PLACES = {
    "launch.py": {"_darwin"},
    "host/darwin_memory.py": {"mac"},
    "confinement/enforce.py": {"landlock_abi", "_call", "restrict"},
}
"""Module -> functions that load a library; everything that calls one goes through a table above."""


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """A compiler for one of the two processors."""
    return Compiler(request.param, tmp_path_factory.mktemp("darwin"))


class Compiler:
    """Compiles for one target, and says what is wrong."""

    def __init__(self, target: str, base: Path) -> None:
        self._zig, self._target, self._base = parts.found(find), target, base

    def errors(self, code: str, suffix: str, *arguments: str) -> str:
        """What the compiler finds wrong, "" if nothing."""
        source = self._base / f"code.{suffix}"
        includes = "\n".join(f"#include <{each}>" for each in HEADERS)
        source.write_text(f"{includes}\n{code}\n")
        done = subprocess.run(
            command(self._zig, self._target, *arguments, str(source)),
            env=environment(self._zig),
            cwd=self._base,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.stderr if done.returncode else ""

    def refused(self, claims: dict[str, str]) -> list[str]:
        """Names of claims that do not hold; each is an expression of C."""
        lines = [f'_Static_assert({claim}, "<{name}>");' for name, claim in claims.items()]
        said = self.errors("\n".join(lines), "c", *OBJECT, "-ferror-limit=0", "-Wno-sign-compare")
        found = re.findall(r"error: .*<(.*?)>", said)
        assert bool(found) == bool(said), said
        return found


def test_every_number_is_that_of_the_headers(compiled: Compiler) -> None:
    assert compiled.refused({name: f"({code}) == ({value:#x})" for name, (value, code) in VALUES.items()}) == []


def test_every_name_that_python_takes_from_the_headers_is_there(compiled: Compiler) -> None:
    assert compiled.refused({name: f"({name}) == ({name})" for names in NAMES.values() for name in names}) == []


def layout(structure: type[ctypes.Structure]) -> Iterator[tuple[str, str]]:
    """Claims on the size of a structure, and on offset and size of each of its fields."""
    c_name, fields = STRUCTURES[structure]
    yield structure.__name__, f"sizeof({c_name}) == {ctypes.sizeof(structure)}"
    for name, *_ in structure._fields_:
        if name not in FILLING:
            field = getattr(structure, name)
            yield f"{name} at", f"offsetof({c_name}, {fields[name]}) == {field.offset}"
            yield f"{name} size", f"sizeof((({c_name} *)0)->{fields[name]}) == {field.size}"


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_is_laid_out_as_the_headers_say(compiled: Compiler, structure: type[ctypes.Structure]) -> None:
    assert compiled.refused(dict(layout(structure))) == []


SIGNATURE = """
template <class A, class B> constexpr bool same() {
  if constexpr (__is_pointer(A) || __is_pointer(B)) return __is_pointer(A) && __is_pointer(B);
  else return __is_integral(A) && __is_integral(B) && sizeof(A) == sizeof(B) && __is_signed(A) == __is_signed(B);
}
// A function with `...` matches neither parameter: it has to be called in another way on arm64.
template <class R, class... A, class S, class... B> constexpr bool abi(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) return false;
  else return same<R, S>() && (same<A, B>() && ...);
}
"""


def signature(name: str, types: tuple[str, ...]) -> str:
    return f'static_assert(abi(&{name}, (int (*)({", ".join(TYPES[each] for each in types)}))nullptr), "<{name}>");'


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_declared_as_the_headers_have_it(compiled: Compiler, name: str) -> None:
    code = SIGNATURE + signature(name, FUNCTIONS[name])
    assert compiled.errors(code, "cpp", *OBJECT, "-std=c++20", "-nostdinc++") == ""


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("proc_pidinfo", ("c_int", "c_int", "c_int", "c_void_p", "c_int")),
        ("proc_listpids", ("c_uint32", "c_uint32", "c_int", "c_int")),
        ("proc_pid_rusage", ("c_int", "c_int")),
        ("open", ("c_char_p", "c_int")),
    ],
)
def test_a_wrong_signature_is_seen_and_one_of_a_variadic_function(
    compiled: Compiler, name: str, types: tuple[str, ...]
) -> None:
    assert name in compiled.errors(SIGNATURE + signature(name, types), "cpp", *OBJECT, "-std=c++20", "-nostdinc++")


def test_every_function_is_in_the_system_library(compiled: Compiler) -> None:
    code = f"void *functions[] = {{{', '.join(f'(void *){name}' for name in FUNCTIONS)}}};"
    assert compiled.errors(code, "c", *LINKED, "-o", "out.dylib") == ""
    missing = "int nowhere_to_be_found(void); int x(void) { return nowhere_to_be_found(); }"
    assert "undefined symbol: _nowhere_to_be_found" in compiled.errors(missing, "c", *LINKED, "-o", "out.dylib")


def test_a_wrong_number_is_seen(compiled: Compiler) -> None:
    assert compiled.refused({"right": "EV_ADD == 1", "wrong": "EV_ADD == 2", "worse": "sizeof(int) == 8"}) == [
        "wrong",
        "worse",
    ]


# ── nothing is left out of the tables ────────────────────────────────────────────────────────────


def trees() -> dict[str, ast.Module]:
    """Every module of the product that names something of macOS's C library, by its path."""
    return {
        str(path.relative_to(PRODUCT)): ast.parse(text)
        for path in sorted(PRODUCT.rglob("*.py"))
        if re.search(r"\b(ctypes|kqueue|KQ_|cffi)", text := path.read_text())
    }


def test_libraries_are_loaded_in_three_places() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in trees().items():
        for function in [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]:
            loads = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and "dll" in n.attr.lower()]
            if [each for each in loads if each.attr != "in_dll"]:
                found.setdefault(path, set()).add(function.name)
    assert found == PLACES
    everywhere = "".join(path.read_text() for path in PRODUCT.rglob("*.py"))
    assert "cffi" not in everywhere and "from ctypes" not in everywhere


def test_every_structure_of_ctypes_is_in_the_table() -> None:
    found = {
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("ctypes" in ast.unparse(base) for base in node.bases)
    }
    assert found == {each.__name__ for each in STRUCTURES}
    for structure, (_, fields) in STRUCTURES.items():
        assert {name for name, *_ in structure._fields_} - FILLING == fields.keys()


def test_every_call_names_a_function_of_the_table_and_numbers_that_have_a_name() -> None:
    called = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("_darwin", "self._call")):
                continue
            name, *arguments = node.args
            assert isinstance(name, ast.Constant), ast.unparse(node)
            called.add(name.value)
            numbers = [each.value for each in arguments if isinstance(each, ast.Constant)]
            assert set(map(str, numbers)) <= {"0", "None"}, f"{path}:{node.lineno}: {numbers}"
        # The library itself is only touched where its functions are declared.
        touched = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self._libc"]
        assert not touched, path
    assert called == FUNCTIONS.keys()


def test_every_constant_of_kqueue_is_in_the_table() -> None:
    found = {
        node.attr
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("KQ_")
    }
    assert found and found <= VALUES.keys()


def test_the_names_are_those_that_the_modules_ask_python_for() -> None:
    for module, names in NAMES.items():
        source = Path(str(module.__file__)).read_text()
        asked = set(re.findall(r'"((?:TCP_KEEP(?:ALIVE|INTVL|CNT)|F_FULL\w+|F_GETPATH|CLOCK_\w+_RAW))"', source))
        assert asked == names


def sysctl_names() -> set[str]:
    """Every name of a sysctl that the product asks for; a number within one is shown as N."""
    found = set()
    begins = "(hw|kern|vm|iogpu|debug|machdep|sysctl|net)\\."
    for path in PRODUCT.rglob("*.py"):
        source = path.read_text()
        if not re.search(rf"[\"']{begins}", source):
            continue  # most files; to parse all of them takes seconds
        nodes = list(ast.walk(ast.parse(source)))
        pieces = {id(each) for node in nodes if isinstance(node, ast.JoinedStr) for each in node.values}
        for node in nodes:
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in pieces:
                text = re.sub(r"\{.*?\}", "N", ast.unparse(node)).lstrip("f").strip("'\"")
                if re.fullmatch(rf"{begins}\w+(\.\w+)*", text):
                    found.add(text)
    return found


def without_headers() -> dict[str, tuple[str, str]]:
    """What is listed on the page as in no header here: name -> (source, check)."""
    section = ACCEPTANCE.read_text().partition("## What no header here covers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    return {name: (source, check) for names, source, check in rows for name in re.findall(r"`([^`]+)`", names)}


def test_what_has_no_header_is_listed_with_its_source_and_a_check_of_the_acceptance_run() -> None:
    from tests.support.mac.mac_checks import CHECKS

    listed = without_headers()
    names = sysctl_names()
    assert names and names <= listed.keys(), names - listed.keys()
    told = (ROOT / "tests/support/mac/mac_host.py").read_text() + (ROOT / "tests/support/mac/mac_metal.py").read_text()
    asked = {re.sub(r"\d", "N", name) for name in re.findall(r'"([a-z]+(?:\.\w+)+)"', told)}
    assert {re.sub(r"\d", "N", name) for name in names} <= asked
    checks = {each.name for each in CHECKS}
    for name, (source, check) in listed.items():
        assert source.strip() and set(re.findall(r"`([^`]+)`", check)) & checks, name
