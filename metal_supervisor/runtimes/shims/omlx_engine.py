"""oMLX's own server behind a gate. oMLX's interpreter runs it instead of the script `omlx`.

By itself it serves the models in a directory, finds a new one there only by unloading all others, writes its command
line into its settings, and either requires its key of all clients or lets any client choose one for its admin API. Here
models are attached and detached one by one while the others answer, all clients may use the attached models, and all
else is for this machine alone, with the key.

    PUT    /metal-supervisor/models/NAME  {"path": …, "settings": {…}}   attached and loaded when it answers 200;
                                          with "names": [NAME, …] requests for those names are for it, too
    DELETE /metal-supervisor/models/NAME                                 unloaded; requests in flight are cut off
    GET    /metal-supervisor/models                                      {"data": [{"id", "loaded", "active", "asked"}]}
    GET    /metal-supervisor/slots/NAME                                  [{"is_processing": …}]

Run as `python -E omlx_engine.py --key-file FILE --base-path DIRECTORY [--served DIRECTORY] ARGUMENTS OF omlx serve`.
The base path is used by nothing else, and is emptied at the start; below `--served` are the files of models, under
their names.
Exit codes: 1 it cannot serve, 69 this version of oMLX is not supported, others oMLX's own (3: the port is taken).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import importlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING or __name__ != "__main__":
    from metal_supervisor.runtimes.shims import gate, wrapper
else:
    import gate  # oMLX's interpreter does not have our package
    import wrapper

KNOWN = "0.7.0"
"""Version of oMLX that this was written for."""
end = functools.partial(wrapper.end, "omlx_engine")
OURS = "/metal-supervisor/"
INFERENCE = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
)
READING = frozenset({"/health", "/v1/models"})
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Trouble(Exception):
    """A failed request to the gate: HTTP status and text."""


class ServedModels:
    """The attached models: one symbolic link each in oMLX's model directory."""

    def __init__(self, state: Any, directory: Path, served: Path | None = None) -> None:
        """`served`: directory with the files of each model under its name, if they could be linked there."""
        self._state, self._directory, self._served = state, directory, served
        self._turns: dict[str, asyncio.Lock] = {}
        """Model -> lock of attach and detach: they run in order, so that the last one holds, also during a load."""
        self._asked: dict[str, dict[str, Any]] = {}
        """Model -> path and settings that it was attached with."""
        self._names: dict[str, str] = {}
        """Further name -> the model that requests for it are for."""
        self.requests: dict[str, set[asyncio.Future[None]]] = {}
        """Requests in flight, by model."""

    @property
    def _pool(self) -> Any:
        if self._state.engine_pool is None:
            raise Trouble(503, "the daemon is not up yet")
        return self._state.engine_pool

    def listed(self) -> list[dict[str, Any]]:
        """The models in the pool, in the form of `/metal-supervisor/models`."""
        entries = sorted(self._pool._entries.items())
        return [
            {"id": name, "loaded": each.engine is not None, "active": self.active(name), "asked": self._asked.get(name)}
            for name, each in entries
        ]

    def active(self, name: str) -> int:
        """Number of a model's requests in flight."""
        return len(self.requests.get(name, ()))

    def name_of(self, asked: object) -> str:
        """Name of the model that a request's `model` resolves to. Models' own names come first."""
        if str(asked) in self._names and self._pool.get_entry(str(asked)) is None:
            return self._names[str(asked)]
        return str(self._pool.resolve_model_id(str(asked), self._state.settings_manager))

    async def attach(self, name: str, path: str, settings: dict[str, Any], names: Sequence[str] = ()) -> None:
        """Add a model and load it, unless it is loaded with the same path and settings. Raises Trouble.

        `names`: further names, which it has instead of those that it had, and takes over from other models.
        """
        link, asked = self._directory / name, {"path": path, "settings": settings}
        async with self._turns.setdefault(name, asyncio.Lock()):
            entry = self._pool.get_entry(name)
            if entry is not None and entry.engine is not None and self._asked.get(name) != asked:
                await self._pool._unload_engine(name)
            self._asked[name] = asked
            self._names = {**self._other_names(name), **dict.fromkeys(names, name)}
            link.unlink(missing_ok=True)
            link.symlink_to(self._place(name, path))
            self._apply(name, settings)
            self._look()
            if self._pool.get_entry(name) is None:
                raise Trouble(400, f"{path} is not a model that oMLX knows")
            try:
                await self._pool.get_engine(name)
            except Exception as error:  # noqa: BLE001 - whatever a model makes a library raise
                raise Trouble(500, f"{type(error).__name__}: {error}"[:1000]) from None

    def _other_names(self, name: str) -> dict[str, str]:
        """The further names of the other models."""
        return {other: model for other, model in self._names.items() if model != name}

    def _place(self, name: str, path: str) -> Path:
        """Directory to read a model from: if confined, this process may not open a `path` attached after its start."""
        here = self._served / name if self._served is not None else None
        return here if here is not None and here.is_dir() else Path(path)

    async def detach(self, name: str) -> None:
        """Unload and forget a model; one that is not there is no error."""
        async with self._turns.setdefault(name, asyncio.Lock()):
            (self._directory / name).unlink(missing_ok=True)
            self._names = self._other_names(name)
            await self._pool._unload_engine(name)
            self._look()
            # One that came just before waits for the unloaded engine without an end, with signs of life for its client.
            for each in self.requests.get(name, ()):
                each.cancel()

    def _look(self) -> None:
        """Have the pool read the directory again. Loaded models stay; all are pinned, or oMLX would evict some."""
        names = [each.name for each in self._directory.iterdir()]
        self._pool.discover_models([str(self._directory)], names)

    def _apply(self, name: str, settings: dict[str, Any]) -> None:
        """Set the settings of one model, by the names of oMLX's own `ModelSettings`. Raises Trouble."""
        manager = self._state.settings_manager
        found = type(manager.get_settings(name))()  # a new object: settings of an earlier attach must not persist
        for field, value in {**settings, "is_pinned": True}.items():
            if not hasattr(found, field):
                raise Trouble(400, f"this oMLX has no {field}")
            setattr(found, field, value)
        manager.set_settings(name, found)


class OmlxGate:
    """ASGI middleware in front of oMLX's application."""

    def __init__(self, app: Any, models: ServedModels, key: str, key_file: Path) -> None:
        self._app, self._models, self._key, self._key_file = app, models, key, key_file

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            else:  # nothing of inference is a websocket
                await send({"type": "websocket.close", "code": 1008})
            return
        path, method = scope["path"], scope["method"]
        local = (scope.get("client") or ("",))[0] in gate.LOCAL
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if gate.from_foreign_page(origins):
            await _answer(send, 403, {"error": {"message": gate.FOREIGN}})
        elif path.startswith(OURS) and local:
            await self._ours(scope, receive, send)
        elif method == "POST" and path in INFERENCE:
            await self._infer(scope, receive, send)
        elif method in ("GET", "HEAD") and path in READING:
            await self._app(self._with_key(scope), receive, send)
        elif local:
            await self._app(scope, receive, send)
        else:
            await _answer(send, 404, {"error": {"message": "not here: only models are served to other machines"}})

    def _with_key(self, scope: dict[str, Any]) -> dict[str, Any]:
        """The request with oMLX's key, and with the content type JSON, which other engines do not require."""
        ours = {b"authorization": f"Bearer {self._key}".encode(), b"content-type": b"application/json"}
        headers = [pair for pair in scope["headers"] if pair[0] not in (*ours, b"x-api-key")]
        return {**scope, "headers": [*headers, *ours.items()]}

    def _current_key(self) -> str:
        """The key that clients of the gate use: its file may have been lost and created again since the start."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._key_file.read_text("utf-8").strip() or self._key
        return self._key

    async def _infer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        try:
            body = await _body(receive)
        except Trouble as trouble:
            return await _refuse(send, trouble)
        try:
            asked = json.loads(body)
            if gate.names_foreign_media(asked):
                return await _refuse(send, Trouble(400, gate.NOT_DATA))
            name = self._models.name_of(asked.get("model"))
            if isinstance(asked.get("model"), str) and asked["model"] != name:  # oMLX knows a model by one name
                body = json.dumps({**asked, "model": name}).encode()
        except (ValueError, AttributeError, RecursionError, Trouble):
            name = ""  # oMLX answers with the error
        given = False

        async def once() -> dict[str, Any]:
            nonlocal given
            if given:
                return await receive()  # the disconnect of the client
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        answer = asyncio.ensure_future(self._app(self._with_key(scope), once, send))
        requests = self._models.requests.setdefault(name, set())
        requests.add(answer)
        try:
            await answer
        finally:
            requests.discard(answer)
            if not requests:  # clients may name anything
                self._models.requests.pop(name, None)
        return None

    async def _ours(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        kind, _, name = unquote(scope["path"][len(OURS) :]).partition("/")
        try:
            if scope["method"] == "GET" and kind == "models" and not name:
                return await _answer(send, 200, {"data": self._models.listed()})
            if scope["method"] == "GET" and kind == "slots":
                return await _answer(send, 200, [{"is_processing": self._models.active(name) > 0}])
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self._current_key()}".encode()):
                raise Trouble(401, "the key is wrong")
            if kind != "models" or not name or "/" in name or name.startswith("."):
                raise Trouble(404, "no such thing")
            if scope["method"] == "DELETE":
                await self._models.detach(name)
            elif scope["method"] == "PUT":
                asked = json.loads(await _body(receive))
                names = [str(each) for each in asked.get("names") or ()]
                await self._models.attach(name, str(asked["path"]), dict(asked.get("settings") or {}), names)
            else:
                raise Trouble(405, "PUT or DELETE")
        except Trouble as trouble:
            return await _refuse(send, trouble)
        except (ValueError, KeyError, TypeError) as error:
            return await _refuse(send, Trouble(400, f"{type(error).__name__}: {error}"[:300]))
        except OSError as error:
            return await _refuse(send, Trouble(500, f"{error}"[:300]))
        return await _answer(send, 200, {"id": name})


async def _body(receive: Receive) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Trouble(400, "the client is gone")
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > gate.MOST_BYTES:
            raise Trouble(413, gate.TOO_LONG)
    return b"".join(parts)


async def _refuse(send: Send, trouble: Trouble) -> None:
    await _answer(send, trouble.args[0], {"error": {"message": trouble.args[1]}})


async def _answer(send: Send, status: int, body: object) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _begin(base: Path, key: str) -> Path:
    """Reset the base path: settings with the key, no models. Returns the models' directory. Raises OSError."""
    models = base / "models"
    models.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in models.iterdir():
        each.unlink()
    (base / "model_settings.json").unlink(missing_ok=True)
    settings = base / "settings.json"
    settings.unlink(missing_ok=True)
    with open(os.open(settings, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({"auth": {"api_key": key}}, file)
    return models


def run_no_model_code(utils: Any) -> None:
    """Make mlx-lm refuse a model whose config.json names a program: before 0.32.2 it runs that."""
    load_config = utils.load_config

    def judged(*arguments: Any, **named: Any) -> Any:
        config = load_config(*arguments, **named)
        if config.get("model_file") is not None:
            raise ValueError("its config.json has model_file; no program of a model is ever run")
        return config

    utils.load_config = judged


def main(argv: list[str]) -> None:
    """Serve; ends the process."""
    own, argv = wrapper.begin(argv, {"--key-file": "", "--base-path": "", "--served": ""})
    base = Path(own["--base-path"])
    served = Path(own["--served"]) if own["--served"] else None
    os.umask(0o077)
    try:
        key_file = Path(own["--key-file"])
        key = key_file.read_text("utf-8").strip()
        directory = _begin(base, key)
    except OSError as error:
        end(f"its base path cannot be made: {error}")
    try:
        cli, server = importlib.import_module("omlx.cli"), importlib.import_module("omlx.server")
        state = server._server_state
        assert callable(cli.main) and hasattr(state, "engine_pool") and hasattr(state, "settings_manager")
        pool = importlib.import_module("omlx.engine_pool").EnginePool
        for name in ("discover_models", "get_engine", "_unload_engine", "get_entry", "resolve_model_id"):
            getattr(pool, name)
        importlib.import_module("omlx.model_settings").ModelSettingsManager.set_settings  # noqa: B018 - is it there?
        run_no_model_code(importlib.import_module("mlx_lm.utils"))
    except Exception as error:  # noqa: BLE001 - an installation may be broken in any way
        why = f"{type(error).__name__}: {error}"[:500]
        end(f"this oMLX is not as it is known here: {why}; install {KNOWN}", wrapper.EXIT_UNKNOWN)
    uvicorn: Any = importlib.import_module("uvicorn")
    run = uvicorn.run
    uvicorn.run = lambda app, **named: run(
        OmlxGate(app, ServedModels(state, directory, served), key, key_file), **named
    )
    sys.argv = ["omlx", "serve", "--base-path", str(base), "--model-dir", str(directory), *argv]
    wrapper.run("omlx_engine", cli.main)


if __name__ == "__main__":
    main(sys.argv[1:])
