"""Flags of the commands for using models: `serve`, `chat`, `list`, `stop`, `start` and `rm`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from metal_supervisor.cli.command_parser import SOURCE_HELP, add_command
from metal_supervisor.cli.terminal import say
from metal_supervisor.settings import loader

OF_A_LOGIN = frozenset({"state_dir", "kubeconfig", "context", "namespace"})
"""Settings that say which system is meant, and which cluster and namespace of it."""
NAME_HELP = "name of an InferenceService, or NAMESPACE/NAME"


def add(commands: Any) -> None:
    """Add the commands."""
    text = "serve a model: check that it fits, apply it, wait until it is ready, and print its URL"
    more = "With --on-demand it is loaded by its first request, and unloaded when unused: docs/on-demand.md."
    serve = add_command(commands, "serve", _serve, text, f". {more}")
    serve.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    serve.add_argument("--name", default="", help="name of the service; default: made of the source")
    serve.add_argument("--ctx", type=int, metavar="N", help="spec.contextSize: tokens of all slots together")
    serve.add_argument("--print", action="store_true", dest="only_print", help="print the manifests, and do nothing")
    serve.add_argument("--detach", action="store_true", help="apply it to the system that runs, and do not wait")
    loader.add_flags(serve)

    def command(name: str, action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = add_command(commands, name, action, text)
        loader.add_flags(made, ("state_dir",))
        return made

    chat = command("chat", _chat, "talk to a model in this terminal")
    chat.add_argument("name", metavar="NAME", help=f"{NAME_HELP}, or the SOURCE that serve was given")
    chat.add_argument("question", nargs="?", help="ask only this; default: ask for questions, or read one from a pipe")
    shown = command("list", _list, "the services: state, model and URL")
    shown.add_argument("--json", action="store_true", help="print JSON, the objects of the API with their `state`")
    for name, text in (
        ("stop", "stop a service: spec.replicas 0"),
        ("start", "start a service that was stopped: spec.replicas 1"),
        ("rm", "remove a service, and its Model if no other uses it; fetched files stay"),
    ):
        command(name, _change, text).add_argument("name", metavar="NAME", help=NAME_HELP)


def _serve(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import serve
    from metal_supervisor.cli.services import is_up
    from metal_supervisor.state.directory import StateDir

    overrides = loader.overrides_from(arguments, os.environ)
    # --on-demand is about this service here, and not a setting of the system.
    on_demand = bool(overrides.values.get("on_demand"))
    values = {name: value for name, value in overrides.values.items() if name != "on_demand"}
    overrides = replace(overrides, values=values)
    settings = loader.settings_of(arguments)
    if is_up(StateDir(settings.state_path)):
        running = loader.load_good(settings.state_path)[0]
        others = {name: value for name, value in values.items() if name not in OF_A_LOGIN}
        if lost := [loader.flag_of(name) for name, value in others.items() if getattr(running, name) != value]:
            say(f"{', '.join(lost)}: serve changes no setting of a system that runs already; see docs/settings.md")
    else:
        settings = loader.load(overrides)
    namespace = settings.namespace or "default"
    order = serve.ServeOrder(arguments.source, arguments.name, arguments.ctx, on_demand, arguments.detach, namespace)
    return serve.Serve(settings, overrides, order, sys.stdout).run(arguments.only_print, say)


def _chat(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import chat

    partner = chat.partner_of(loader.settings_of(arguments), arguments.name)
    if arguments.question is None and sys.stdin.isatty():
        chat.talk(partner, input, sys.stdout)
    else:
        question = sys.stdin.read() if arguments.question is None else arguments.question
        chat.Conversation(partner).answer(question, sys.stdout)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import services

    return services.show(loader.settings_of(arguments), arguments.json, sys.stdout)


def _change(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import services

    return services.change(loader.settings_of(arguments), arguments.command, arguments.name, sys.stdout)
