"""The argument parser of all commands: short help, commands in groups, and the nearest name for a mistyped one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from metal_supervisor.settings import checks, loader
from metal_supervisor.spec.nearest import did_you_mean

GROUPS = {
    "Use": ("serve", "chat", "list", "stop", "start", "rm", "run", "status", "explain", "logs"),
    "Models": ("pull", "models", "fit"),
    "This Mac": (
        "install",
        "uninstall",
        "upgrade",
        "doctor",
        "key",
        "log-level",
        "completion",
        "version",
    ),
    "Cluster": ("kubeconfig", "cordon", "uncordon", "drain"),
}
"""Commands by group, in the order of `--help`. A command without a help text is internal, and in none."""
MANY = 10
"""A command with more settings than this lists them with --help-all only."""
HINT = (
    "Every setting is a flag as well, such as --port 9091: docs/settings.md explains them, --help-all lists them here."
)
SOURCE_HELP = (
    "GGUF file or MLX directory; OWNER/REPO[:QUANT] of Hugging Face; ollama://NAME:TAG; a URL; or a shipped example, "
    "such as qwen3-4b"
)
"""Names of a model, the same for each command that takes one."""


class CommandParser(argparse.ArgumentParser):
    """Parser of `metal-supervisor`, or of one of its commands."""

    def with_help_all(self) -> None:
        """Add --help-all to each command whose help leaves out the settings."""
        for command in self.commands().values():
            if command.hidden():
                command.add_argument("--help-all", action=_HelpAll, help="show this help with every setting, and exit")

    def commands(self) -> dict[str, CommandParser]:
        """The commands below this one, by name."""
        return {name: each for group in _below(self) for name, each in group.choices.items()}

    def hidden(self) -> list[argparse.Action]:
        """The flags that --help leaves out."""
        settings = [each for each in self._actions if is_setting(each)]
        return settings if len(settings) > MANY else []

    def format_usage(self) -> str:
        """Usage in a line or two: without the settings that --help leaves out."""
        formatter = self._get_formatter()
        self._add_usage(formatter, self.hidden())
        return formatter.format_help()

    def format_help(self) -> str:
        """Help without the settings if there are many, and with commands in groups if this is the first parser."""
        return self.help_without(self.hidden())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and end with the nearest flag if one is unknown.

        The parser that knows the flags of a command is the command's own, so that the answer cannot wait for the first.
        """
        words = sys.argv[1:] if args is None else list(args)
        flag = words[0].partition("=")[0] if words else ""
        # What follows such a flag would be taken for the command.
        elsewhere = any(flag in each._option_string_actions for each in self.commands().values())
        if elsewhere and flag not in self._option_string_actions:
            self.error(f"{flag} comes after the command; see {self.prog} --help")
        if any(not each.option_strings for each in self._actions):
            words = [self._alone(word, after) for word, after in zip_longest(words, words[1:], fillvalue="true")]
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found, unknown

    def _alone(self, word: str, after: str) -> str:
        """A word; a setting that is true alone does not take what is after it, which is of the command."""
        action = self._option_string_actions.get(word)
        alone = action is not None and action.const == "true" and after.lower() not in loader.TRUTHS
        return f"{word}=true" if alone else word

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            public = [each.dest for each in action._choices_actions]
            raise argparse.ArgumentError(None, self._unknown_name("command", str(value), public))
        super()._check_value(action, value)

    def _unknown(self, words: Sequence[str]) -> str:
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not flags:
            return f"{words[0]!r:.40} is one argument too many; see {self.prog} --help"
        known = [option for action in self._actions for option in action.option_strings]
        return self._unknown_name("flag", flags[0], known)

    def _unknown_name(self, kind: str, name: str, known: Sequence[str]) -> str:
        return f"there is no {kind} {name!r:.40}{did_you_mean(name, known)}; see {self.prog} --help"

    def _add_usage(self, formatter: argparse.HelpFormatter, hidden: Sequence[argparse.Action]) -> None:
        shown = [each for each in self._actions if each not in hidden]
        formatter.add_usage(self.usage, shown, self._mutually_exclusive_groups)

    def help_without(self, hidden: Sequence[argparse.Action]) -> str:
        """Help with every flag but the hidden ones."""
        formatter = self._get_formatter()
        self._add_usage(formatter, hidden)
        formatter.add_text(self.description)
        for group in self._action_groups:
            shown = [each for each in group._group_actions if each not in hidden]
            if any(isinstance(each, argparse._SubParsersAction) for each in shown) and "run" in self.commands():
                (commands,) = _below(self)
                choices = {each.dest: each for each in commands._choices_actions}
                for title, names in GROUPS.items():
                    _add_section(formatter, title, [choices[name] for name in names])
            else:
                _add_section(formatter, group.title, shown)
        formatter.add_text(HINT if hidden else self.epilog)
        return formatter.format_help()


class _HelpAll(argparse._HelpAction):
    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.help_without([]), end="")
        parser.exit()


def add_command(
    commands: Any, name: str, action: Callable[[argparse.Namespace], int], text: str, more: str = ""
) -> argparse.ArgumentParser:
    """Add a command. `text`: its line in the help of all; `more`: what its own help says after that."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text + more)
    command.set_defaults(action=action)
    return command


def state_dir(text: str) -> str:
    """The value of a --state-dir. An empty one, as of a variable that is not set, would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty; leave the flag out for the default")
    return usable_path(text)


def usable_path(text: str) -> str:
    """The value of an argument that is a path, which may begin with `~`."""
    if problem := checks.path(text):
        raise argparse.ArgumentTypeError(f"{problem}, not {text!r:.200}")
    return text


def is_setting(action: argparse.Action) -> bool:
    """True for the flag of a setting, False for a command's own flag of the same name."""
    named = bool(action.option_strings) and action.dest in loader.FIELDS
    return named and (action.dest == "state_dir" or action.metavar == action.dest.upper())


def _below(parser: argparse.ArgumentParser) -> list[argparse._SubParsersAction[CommandParser]]:
    return [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]


def _add_section(formatter: argparse.HelpFormatter, title: str | None, actions: Sequence[argparse.Action]) -> None:
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
