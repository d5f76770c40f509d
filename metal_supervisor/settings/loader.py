"""Settings, declared once: TOML file < environment `METAL_SUPERVISOR_*` < flags.

The flags carry the names of LLMKube's own agent, so that a launchd plist can be ported by changing one
path. The TOML file, the environment names, the flags, `conf/metal-supervisor.toml` and the error messages all
follow from the one declaration in schema.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
import types
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metal_supervisor.settings import checks
from metal_supervisor.settings.schema import FIELDS, HUB, PATHS, Settings
from metal_supervisor.spec import fields
from metal_supervisor.spec.nearest import did_you_mean
from metal_supervisor.spec.user_error import UserError

__all__ = ["FIELDS", "HUB", "PATHS", "Settings"]

ENV_PREFIX = "METAL_SUPERVISOR_"
KEY_VARIABLE = f"{ENV_PREFIX}KEY"
"""Variable with the key that `chat` shows to the gateway; a secret of the user's shell, and no setting."""
OVERRIDES_FILE = "overrides.json"
GOOD_FILE = "settings.json"
RUN_DIRECTORY = ".run"
MAKE_RUN = "tools/make_run.py"
"""What a checkout has beside `.run`."""
UNLIKE = "; docs/settings.md has them all"


class ConfigError(UserError):
    """A setting is invalid; the message names it, its origin and the remedy."""

    code = 78
    """EX_CONFIG of sysexits.h."""


_TYPES: Mapping[str, Any] = {name: type(item.default) for name, item in FIELDS.items()}
_WORDS: Mapping[Any, str] = types.MappingProxyType(
    {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
)
TRUTHS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def usual_state_dir(environ: Mapping[str, str]) -> str:
    """State directory of the commands that install or remove a system: the environment's, else the default."""
    return environ.get(f"{ENV_PREFIX}STATE_DIR") or Settings().state_dir


def running_systems() -> list[Path]:
    """State directories of this user's running systems; the command line replaces it, which may read processes."""
    return []


def found_state_dir(environ: Mapping[str, str]) -> str:
    """State directory of the commands that work on an existing system.

    The environment's, else that of a running system, `./.run` and the default first, else `local_state_dir`.
    Raises ConfigError if several run, and neither of those two.
    """
    here = local_state_dir(environ)
    if environ.get(f"{ENV_PREFIX}STATE_DIR"):
        return here
    running = running_systems()
    for each in (here, usual_state_dir(environ)):
        if Path(each).expanduser().resolve() in running:
            return each
    if len(running) > 1:
        names = ", ".join(shlex.quote(str(each)) for each in running)
        raise ConfigError(f"{len(running)} systems run: {names}; choose one with --state-dir")
    return str(running[0]) if running else here


def local_state_dir(environ: Mapping[str, str]) -> str:
    """The environment's state directory, else `./.run` if a system was started in it, else the default."""
    if said := environ.get(f"{ENV_PREFIX}STATE_DIR"):
        return said
    try:
        return RUN_DIRECTORY if system_in(Path(RUN_DIRECTORY)) else usual_state_dir(environ)
    except ConfigError:  # it is another user's, or no directory at all
        return usual_state_dir(environ)


def start_command(state: Path) -> str:
    """What starts the system of a state directory: `run` by itself does not look for `./.run`."""
    if state == Path(usual_state_dir(os.environ)).expanduser().absolute():
        return "metal-supervisor run"
    for place, command in ((state, "make run"), (state.parent, "make run CLUSTER=…")):
        if place.name == RUN_DIRECTORY and (place.parent / MAKE_RUN).is_file():
            return command
    return f"metal-supervisor run --state-dir {shlex.quote(str(state))}"


def system_in(state: Path) -> bool:
    """True if a system was started in a state directory. Raises ConfigError if that cannot be looked at."""
    try:
        os.stat(state / OVERRIDES_FILE)
    except FileNotFoundError:
        return False
    except OSError as error:
        text = f"state directory {state} cannot be read: {error.strerror}; run this as the user whose system it is"
        raise ConfigError(f"{text}, or name another with --state-dir") from None
    return True


def checked(name: str, value: Any, origin: str) -> Any:
    """A value for the setting of that name, in its type. Raises ConfigError, which begins with `origin`."""
    wanted = _TYPES[name]
    try:
        if wanted is bool:
            truth = value if isinstance(value, bool) else TRUTHS.get(str(value).lower())
            if truth is None:
                raise ValueError
            return truth
        if isinstance(value, bool) or (not isinstance(value, str) and wanted is str):
            raise ValueError
        if wanted is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        length_s = fields.seconds_of(value) if wanted is float and isinstance(value, str) else None
        result = wanted(value if length_s is None else length_s)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{origin}: {name} must be {_WORDS[wanted]}, not {value!r:.200}") from None
    check = FIELDS[name].metadata["check"]
    problem = check(result) if check else None
    if problem is None and isinstance(result, str) and any(unicodedata.category(char) == "Cc" for char in result):
        problem = "must not contain control characters"
    if problem is None and name in (*PATHS, "allowed_roots"):
        paths = [result] if name in PATHS else checks.listed(result)
        problem = next(filter(None, map(checks.path, paths)), None)
    if name == "state_dir" and not result:  # as a path, that is the current directory
        problem = "must not be empty; leave it out for the default"
    if problem:
        plain = re.sub("//[^/]*@", "//…@", repr(value))
        raise ConfigError(f"{origin}: {name} {problem}, not {plain:.200}")
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file. Raises ConfigError with the file, the line or the key."""
    try:
        text = path.read_text("utf-8-sig")  # some editors begin a file with a mark of its encoding
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return placed(parsed(text, str(path)), path.absolute().parent)


def placed(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The settings of a TOML file in that directory, with its relative paths resolved against the directory."""
    # supervisord, launchd and a shell start our programs in different directories, so the current one is no base.
    named = (name for name in PATHS & values.keys() if values[name] and not values[name].startswith("~"))
    return {**values, **{name: _resolved(name, values[name], directory) for name in named}}


def _resolved(name: str, value: str, directory: Path) -> str:
    """The absolute form of a path, or of a list of kubeconfigs."""
    paths = checks.kubeconfigs(value) if name == "kubeconfig" else [Path(value).expanduser()]
    return os.pathsep.join(str((directory / each).absolute()) for each in paths)


def parsed(text: str, where: str) -> dict[str, Any]:
    """The settings of a TOML text that is, or will be, in that file. Raises ConfigError."""
    if sys.version_info >= (3, 11):  # here, as it takes some ms to load, and most systems have no such file
        import tomllib
    else:
        import tomli as tomllib

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid TOML: it is nested too deeply") from None
    for key in content:
        if key not in FIELDS:
            raise ConfigError(f"{where}: unknown setting {key!r}{did_you_mean(key, FIELDS) or UNLIKE}")
    return {key: checked(key, value, where) for key, value in content.items()}


def edited(text: str, values: Mapping[str, Any], where: str) -> str:
    """The text of a TOML file with these settings changed, and all else as its owner wrote it. Raises ConfigError."""
    lines = text.splitlines()
    for name, value in values.items():
        line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
        at = next((i for i, each in enumerate(lines) if each.partition("=")[0].strip(" \t\"'") == name), None)
        if at is None:
            lines.append(line)
        elif _said_in(lines[at], where).get(name) != value:
            lines[at] = line + _comment(lines[at], where)
    result = "\n".join(lines) + "\n"
    wanted = {**parsed(text, where), **values}
    with contextlib.suppress(ConfigError):
        if parsed(result, where) == wanted:
            return result
    raise ConfigError(f"{where}: cannot set {', '.join(values)} in it; write each setting on a line of its own")


def _said_in(line: str, where: str) -> dict[str, Any]:
    """The settings of a line, {} if the line is not complete by itself."""
    with contextlib.suppress(ConfigError):
        return parsed(line, where)
    return {}


def _comment(line: str, where: str) -> str:
    """The comment at the end of a setting's line, with the space before it, "" without one."""
    signs = (at for at, sign in enumerate(line) if sign == "#")
    at = next((at for at in signs if _said_in(line[:at], where)), None)
    return "" if at is None else line[len(line[:at].rstrip()) :]


def read_env(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings among environment variables; an unknown METAL_SUPERVISOR_* name is an error."""
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in (f"{ENV_PREFIX}CONFIG", KEY_VARIABLE):
            continue
        if variable == ENV_PREFIX + "STATE_DIR" and not value:
            continue  # as a shell script leaves it that exports what it was not given
        name = variable[len(ENV_PREFIX) :].lower()
        if name not in FIELDS:
            known = [ENV_PREFIX + each.upper() for each in FIELDS]
            raise ConfigError(f"environment: unknown setting {variable!r}{did_you_mean(variable, known) or UNLIKE}")
        found[name] = checked(name, value, f"environment {variable}")
    return found


@dataclass(frozen=True)
class Overrides:
    """Settings given when the system was started, saved so that all of its programs use the same."""

    config: str = ""
    """Path of the TOML file, "" without one; it is read anew whenever a program starts."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings from the environment and the flags."""


def load(overrides: Overrides, **defaults: Any) -> Settings:
    """Settings from the overrides, else the TOML file, else `defaults`. Raises ConfigError."""
    from_file = read_toml(Path(overrides.config)) if overrides.config else {}
    return Settings(**{**defaults, **from_file, **overrides.values})


def missing_kubeconfig(settings: Settings) -> str:
    """Message if no file of the kubeconfig exists, "" otherwise."""
    if settings.embedded or any(map(Path.is_file, checks.kubeconfigs(settings.kubeconfig))):
        return ""
    return f"kubeconfig {settings.kubeconfig} does not exist; check --kubeconfig (CLUSTER=… with make)"


def settings_of(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings of the system that a command addresses; its command line takes precedence. Raises ConfigError."""
    overrides = overrides_from(arguments, environ)
    settings = load(overrides, state_dir="")
    if not settings.state_dir:
        settings = dataclasses.replace(settings, state_dir=found_state_dir(environ))
    if system_in(settings.state_path):  # the running system's own overrides
        settings = dataclasses.replace(load_good(settings.state_path)[0], **overrides.values)
    return settings


def add_flags(parser: argparse.ArgumentParser, only: Sequence[str] = ()) -> None:
    """Add one flag per setting, or per setting in `only`, and --config."""
    parser.add_argument("--config", default=None, metavar="FILE", help="TOML file with settings")
    for name, item in FIELDS.items():
        if only and name not in only:
            continue
        shown = f"{item.metadata['help']} [{item.default}]" if item.default != "" else item.metadata["help"]
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if _TYPES[name] is bool else {}
        parser.add_argument(flag_of(name), default=None, metavar=name.upper(), help=shown.replace("%", "%%"), **alone)


def overrides_from(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Overrides:
    """Validated settings from flags and environment, flags first; paths are absolute. Raises ConfigError."""
    values = read_env(environ)
    for name in FIELDS:
        given = getattr(arguments, name, None)
        if given is not None:
            values[name] = checked(name, given, flag_of(name))
    for name in PATHS & values.keys():
        if values[name]:  # supervisord runs our programs in another directory
            values[name] = _resolved(name, values[name], Path())
    config = arguments.config or environ.get(ENV_PREFIX + "CONFIG", "")
    if problem := checks.path(config):
        raise ConfigError(f"--config: {problem}, not {config!r:.200}")
    return Overrides(str(Path(config).expanduser().absolute()) if config else "", values)


def save_overrides(state: Path, overrides: Overrides) -> None:
    """Save the overrides in the state directory, for the programs that supervisord starts."""
    text = json.dumps({"config": overrides.config, "values": dict(overrides.values)}, indent=1, sort_keys=True)
    _replace(state / OVERRIDES_FILE, text + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, "utf-8")
        temporary.chmod(0o600)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def load_saved(state: Path) -> Settings:
    """Settings of the system with this state directory. Raises ConfigError."""
    try:
        saved = json.loads((state / OVERRIDES_FILE).read_text("utf-8"))
        values = {name: checked(name, value, OVERRIDES_FILE) for name, value in saved["values"].items()}
        if not isinstance(saved["config"], str):
            raise TypeError("config must be a path")
        overrides = Overrides(saved["config"], values)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        text = f"{state / OVERRIDES_FILE} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(f"{text}; start the system with: {start_command(state)}") from None
    return dataclasses.replace(load(overrides), state_dir=str(state))


def load_good(state: Path) -> tuple[Settings, str]:
    """(the saved settings, ""), or (the last valid settings, the problem with those on file now).

    Raises ConfigError if there have never been valid ones.
    """
    kept = state / GOOD_FILE
    try:
        settings = load_saved(state)
    except ConfigError as error:
        return _last_good(kept, state, error), str(error)
    text = json.dumps(dataclasses.asdict(settings), indent=1, sort_keys=True) + "\n"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if kept.read_text("utf-8") == text:
            return settings, ""
    with contextlib.suppress(OSError):
        _replace(kept, text)
    return settings, ""


def _last_good(kept: Path, state: Path, problem: ConfigError) -> Settings:
    try:
        found = json.loads(kept.read_text("utf-8"))
        values = {name: checked(name, value, GOOD_FILE) for name, value in found.items() if name in FIELDS}
    except (OSError, ValueError, AttributeError, RecursionError, ConfigError):
        raise problem from None
    return dataclasses.replace(Settings(**values), state_dir=str(state))


def _shipped(name: str) -> Path:
    package = Path(__file__).parents[1]
    return next(path for path in (package / f"_{name}", package.parent / name) if path.is_dir())


def conf_dir() -> Path:
    """The directory of shipped configuration: beside the package in a checkout, inside it when installed."""
    return _shipped("conf")


def launchd_dir() -> Path:
    """The directory of the files for launchd: beside the package in a checkout, inside it when installed."""
    return _shipped("launchd")
