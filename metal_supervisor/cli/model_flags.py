"""Flags of `metal-supervisor models` and `metal-supervisor pull`, and the calls behind them."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from metal_supervisor.cli.command_parser import SOURCE_HELP, add_command
from metal_supervisor.cli.terminal import USAGE, CommandError, say
from metal_supervisor.models import housekeeping
from metal_supervisor.models.listing import Unusable
from metal_supervisor.settings import loader
from metal_supervisor.spec.fields import Bad

if TYPE_CHECKING:
    from metal_supervisor.cli.models import ModelsCommand

STORE = ("state_dir", "model_store")
FETCHING = (
    *STORE,
    "hf_endpoint",
    "allowed_hosts",
    "private_hosts",
    "allowed_roots",
    "stall_timeout",
    "ollama_url",
    "ollama_registry",
)


def add(commands: Any) -> None:
    """Add both commands."""
    _add_pull(commands)
    help_text = "the models in the store of this Mac: list, check, remove"
    models = commands.add_parser("models", help=help_text, description=help_text)
    under = models.add_subparsers(dest="models_command", required=True, metavar="COMMAND")
    help_text = "what is in the store: size, last use, what uses it, where it is from"
    ls = add_command(under, "ls", lambda given: _models(given).ls(given.json), help_text)
    ls.add_argument("--json", action="store_true", help="print JSON, with paths and digests")
    help_text = "hash files again and compare them with what they were; 1 if one is damaged"
    verify = add_command(under, "verify", lambda given: _models(given).verify(given.slots, given.json), help_text)
    verify.add_argument("slots", nargs="*", metavar="SLOT", help="slot, the beginning of one, or a source [all]")
    verify.add_argument("--json", action="store_true", help="print JSON: a list of slot, file, verdict, why")
    help_text = "remove models that no service uses; partial ones too"
    rm = add_command(under, "rm", lambda given: _models(given).rm(given.slots, given.yes, given.force), help_text)
    rm.add_argument("slots", nargs="+", metavar="SLOT|SOURCE", help="slot, the beginning of one, or a source")
    rm.add_argument("--force", action="store_true", help="even if a service uses it")
    help_text = "remove what never became whole, and unused models as the options say, with their sizes"
    gc = add_command(under, "gc", _gc, help_text)
    gc.add_argument("--keep", type=int, metavar="N", help="keep the N unused models that were used last")
    gc.add_argument("--size", metavar="SIZE", help="remove unused models until the store has this size, e.g. 200G")
    gc.add_argument("--older", metavar="PERIOD", help="remove models that were not used for longer, e.g. 30d")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    for each in (rm, gc):
        each.add_argument("--yes", action="store_true", help="do not ask")
    for each in (ls, verify, rm, gc):
        loader.add_flags(each, STORE)


def _add_pull(commands: Any) -> None:
    pull = add_command(commands, "pull", _pull, "fetch a model into the store of this Mac, and print its path")
    pull.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    pull.add_argument("--files", metavar="A,B", help="files of a repository, separated by commas (spec.files)")
    pull.add_argument("--format", choices=("gguf", "mlx", "safetensors"), help="spec.format [gguf]")
    pull.add_argument("--quantization", metavar="WORD", help="which GGUF file of a repository, e.g. Q4_K_M")
    pull.add_argument("--sha256", metavar="HEX", help="what the file must be")
    pull.add_argument(
        "--secret-env",
        action="append",
        metavar="NAME",
        default=[],
        help="variable of the environment that goes with the request as a key of spec.sourceSecretRef would, e.g. "
        "HF_TOKEN for a server that is not the Hub; may be given several times",
    )
    loader.add_flags(pull, FETCHING)


def _gc(arguments: argparse.Namespace) -> int:
    try:
        if arguments.keep is not None and arguments.keep < 0:
            raise Bad("InvalidSpec", f"--keep must not be negative, and is {arguments.keep}")
        size = None if arguments.size is None else housekeeping.size_bytes(arguments.size, "--size")
        older = None if arguments.older is None else housekeeping.period_s(arguments.older, "--older")
    except Bad as bad:
        raise CommandError(bad.message, USAGE) from None
    bounds = housekeeping.Bounds(arguments.keep, size, older)
    return _models(arguments).gc(bounds, arguments.yes, arguments.dry_run)


def _models(arguments: argparse.Namespace) -> ModelsCommand:
    from metal_supervisor.cli.models import ModelsCommand

    return ModelsCommand(loader.settings_of(arguments))


def _pull(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import model_source, pull

    files = [each.strip() for each in (arguments.files or "").split(",") if each.strip()]
    flags = {
        "format": arguments.format,
        "files": files,
        "quantization": arguments.quantization,
        "sha256": arguments.sha256,
    }
    given = {name: value for name, value in flags.items() if value}
    settings = loader.settings_of(arguments)
    try:
        found = model_source.named(arguments.source)
        if not found.format and not given and not arguments.secret_env:
            with contextlib.suppress(Unusable):  # the store, which tries again, reports it
                chosen = model_source.resolve(settings, arguments.source)
                found = chosen if chosen.note or chosen.format == "mlx" else found
    except Bad as bad:
        raise CommandError(pull.for_a_terminal(bad.message), USAGE) from None
    if found.note:
        say(found.note)
    spec = {**found.model, "format": found.format or "gguf", **given, "source": found.source}
    return pull.main(settings, spec, arguments.secret_env, say)
