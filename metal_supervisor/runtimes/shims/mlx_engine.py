"""mlx_lm's own server, limited to one model. mlx_lm's interpreter runs it instead of the script `mlx_lm.server`.

By itself that server loads any path or repository that a request names (`model`, `adapters`, `draft_model`), fetches
the URLs of images, reports health before its model is loaded, keeps running when the model cannot be loaded or the port
is taken, answers under the model's path and to any web page, and exceeds its prompt cache limit. Here only the model of
`--model` is ever loaded, it answers under the given names, pages of other hosts are refused, and any failure ends the
process.

Run as `python -E mlx_engine.py --alias NAME[,NAME] [--context TOKENS] ARGUMENTS OF mlx_lm.server`; needs mlx_lm alone.
Exit codes: 1 it cannot serve, 2 an argument is wrong, 69 this version of mlx_lm is not supported.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import pwd
import site
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __name__ != "__main__":
    from metal_supervisor.runtimes.shims import gate, wrapper
else:
    import gate  # mlx_lm's interpreter does not have our package
    import wrapper

KNOWN = "0.32.2"
"""Version of mlx_lm that this was written for."""
end = functools.partial(wrapper.end, "mlx_engine")


def hold_to_one_model(server: Any, context: int) -> None:
    """Patch the server to load one model only, to limit context and prompt cache, and to exit when it fails.

    `context`: tokens of one slot, 0 for no limit. Raises AttributeError if this mlx_lm is not supported.
    """
    provider, generator = server.ModelProvider, server.ResponseGenerator
    load, init, run = provider.load, generator.__init__, generator._generate
    tokenize, generate = generator._tokenize, generator.generate

    def load_one(self: Any, *_asked: Any) -> Any:
        if self.model is None:
            load(self, "default_model", None, "default_model")
        return self.model, self.tokenizer

    def begin(self: Any, model_provider: Any, prompt_cache: Any) -> None:
        if (limit := getattr(model_provider.cli_args, "prompt_cache_bytes", None)) is not None:
            prompt_cache.max_bytes = limit  # by itself it is enforced only when a request joins a batch
        init(self, model_provider, prompt_cache)

    def run_or_end(self: Any) -> None:
        try:
            run(self)
        except BaseException as error:  # noqa: BLE001 - whatever a model makes a library raise
            what = "the model cannot be loaded" if self.model_provider.model is None else "it failed at an answer"
            end(f"{what}: {type(error).__name__}: {error}"[:1000])

    def bounded(self: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        found = tokenize(self, tokenizer, request, args)
        room = context - len(found[0])
        if context and room <= 0:
            raise ValueError(f"the prompt has {len(found[0])} tokens, a slot {context} in all (spec.contextSize)")
        args.max_tokens = min(args.max_tokens, room) if context else args.max_tokens
        return found

    def generate_alike(self: Any, request: Any, args: Any, *rest: Any, **named: Any) -> Any:
        # Under one name, because requests for different names would not be batched.
        args.model = dataclasses.replace(args.model, model="default_model", draft="default_model", adapter=None)
        return generate(self, request, args, *rest, **named)

    provider.load, generator.__init__, generator._generate = load_one, begin, run_or_end
    generator._tokenize, generator.generate = bounded, generate_alike


def hold_to_names(server: Any, names: list[str]) -> None:
    """Patch the server to answer under these names alone, fetch nothing for a request, and be healthy once loaded.

    Raises AttributeError if this mlx_lm is not supported.
    """
    handler, complete = server.APIHandler, server.APIHandler.handle_completion
    for each in (handler.handle_models_request, handler.handle_health_check, server._inline_image_urls, server.main):
        assert callable(each)  # patching a method that was renamed would have no effect

    def answer(self: Any, status: int, body: dict[str, Any]) -> None:
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
        self.wfile.flush()

    def check(self: Any, request: Any, stop_words: Any) -> None:
        asked = self.requested_model
        if asked not in (*names, "default_model"):
            answer(self, 404, {"error": f"this server serves {', '.join(names)}, not {asked!r:.200}"})
        elif self.adapter is not None or self.requested_draft_model != "default_model":
            answer(self, 400, {"error": "a request cannot choose adapters or a draft model here"})
        else:
            complete(self, request, stop_words)

    def models(self: Any) -> None:
        listed = [{"id": name, "object": "model", "created": self.created} for name in names]
        answer(self, 200, {"object": "list", "data": listed})

    def health(self: Any) -> None:
        loaded = self.response_generator.model_provider.model is not None
        answer(self, 200 if loaded else 503, {"status": "ok" if loaded else "loading"})

    def no_urls(messages: Any) -> None:
        if any(not str(server._image_url(part)).startswith("data:") for part in server._image_parts(messages)):
            raise ValueError("images must be data: URLs; nothing is fetched for a request")

    server.ThreadingHTTPServer.request_queue_size = 128  # the default, 5, turns away the sixth that waits
    server._inline_image_urls = no_urls
    handler.handle_completion, handler.handle_models_request, handler.handle_health_check = check, models, health


def refuse_web_pages(server: Any) -> None:
    """Patch the server to answer 403 to requests of web pages of other hosts, before their bodies are read."""
    handler = server.APIHandler
    parse = handler.parse_request

    def parse_ours(self: Any) -> bool:
        if not parse(self):
            return False
        if gate.from_foreign_page(self.headers.get_all("origin") or ()):
            self.close_connection = True
            self.send_error(403, gate.FOREIGN)
            return False
        return True

    handler.parse_request = parse_ours


def add_user_packages() -> None:
    """Find what `pip install --user` installed: HOME is the engine's own directory, not the account's."""
    if not site.ENABLE_USER_SITE:
        return
    own = os.environ.get("HOME", "")
    try:
        os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        site.USER_BASE = site.USER_SITE = None
        site.addsitedir(site.getusersitepackages())
    except KeyError:
        pass  # a user without an account has no packages
    finally:
        os.environ["HOME"] = own


def main(argv: list[str]) -> None:
    """Serve; ends the process."""
    own, argv = wrapper.begin(argv, {"--alias": "", "--context": "0"})
    # The tracker of semaphores outlives this process, and its warning would follow the reason of the exit in the log.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    add_user_packages()
    try:
        version = importlib.metadata.version("mlx-lm")
        server = importlib.import_module("mlx_lm.server")
    except Exception as error:  # noqa: BLE001 - an installation may be broken in any way
        end(f"mlx_lm cannot be used: {type(error).__name__}: {error}; reinstall it"[:1000], wrapper.EXIT_UNKNOWN)
    try:
        hold_to_one_model(server, int(own["--context"]))
        hold_to_names(server, own["--alias"].split(","))
        refuse_web_pages(server)
    except AttributeError as error:
        end(f"mlx-lm {version} is not as it is known here: {error}; install mlx-lm=={KNOWN}", wrapper.EXIT_UNKNOWN)
    sys.argv = ["mlx_lm.server", *argv]
    wrapper.run("mlx_engine", server.main)


if __name__ == "__main__":
    main(sys.argv[1:])
