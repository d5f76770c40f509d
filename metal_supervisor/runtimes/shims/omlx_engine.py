"""oMLX's own server behind a gate: run by oMLX's interpreter instead of its script `omlx`.

By itself it serves what lies in a directory, finds a new model there only by unloading all others, writes what it was
started with into its settings, and either asks everybody for its key or lets anybody choose one for its admin API.
Here models are attached and detached one by one while the others answer, whoever may reach it may ask the models it
has, and all else is for this machine alone, with the key.

    PUT    /metal-supervisor/models/NAME  {"path": …, "settings": {…}}   attached and loaded when it answers 200
    DELETE /metal-supervisor/models/NAME                                 unloaded; what it still answers is cut off
    GET    /metal-supervisor/models                                      {"data": [{"id", "loaded", "active", "asked"}]}
    GET    /metal-supervisor/slots/NAME                                  [{"is_processing": …}]

Run as `python -E omlx_engine.py --key-file FILE --base-path DIRECTORY [--served DIRECTORY] ARGUMENTS OF omlx serve`.
The base path is ours alone, and begins empty; below `--served` are the files of models, under their names. A spec of an
older release may name this file: keep its arguments as they are.
Exit codes: 1 it cannot serve, 69 this oMLX is not as it is known here, others oMLX's own (3: the port is taken).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib
import io
import json
import os
import select
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING or __name__ != "__main__":
    from metal_supervisor.runtimes.shims import gate
else:
    import gate  # oMLX's interpreter does not have our package

KNOWN = "0.7.0"
"""The oMLX that this was written for."""
EXIT_CANNOT_SERVE, EXIT_UNKNOWN = 1, 69
OURS = "/metal-supervisor/"
INFERENCE = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/messages",
    "/v1/messages/count_tokens",
})  # fmt: skip
READING = frozenset({"/health", "/v1/models"})
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class OmlxLog(io.TextIOBase):
    """The standard outputs; nobody may be there to read them, and that must not cut an answer off."""

    turn = threading.RLock()  # what is collected while it writes may have something to say, too

    def write(self, text: str) -> int:
        with OmlxLog.turn, contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "replace"))
        return len(text)


class Trouble(Exception):
    """A request of ours that cannot be carried out: HTTP status and text."""


class ServedModels:
    """The models of the daemon, one link each in a directory of ours."""

    def __init__(self, state: Any, directory: Path, served: Path | None = None) -> None:
        """`served`: where the files of a model are under its name, if they could be linked there."""
        self._state, self._directory, self._served = state, directory, served
        self._turns: dict[str, asyncio.Lock] = {}
        """Whoever attaches or detaches a model has its turn: what is asked last holds, also during a load."""
        self._asked: dict[str, dict[str, Any]] = {}
        """Path and settings that each was attached with."""
        self.active: Counter[str] = Counter()
        """Answers that are being given, by model."""

    @property
    def _pool(self) -> Any:
        if self._state.engine_pool is None:
            raise Trouble(503, "the daemon is not up yet")
        return self._state.engine_pool

    def listed(self) -> list[dict[str, Any]]:
        """What there is, as `/metal-supervisor/models` shows it."""
        entries = sorted(self._pool._entries.items())
        return [
            {"id": name, "loaded": each.engine is not None, "active": self.active[name], "asked": self._asked.get(name)}
            for name, each in entries
        ]

    def name_of(self, asked: object) -> str:
        """The model that a request means."""
        return str(self._pool.resolve_model_id(str(asked), self._state.settings_manager))

    async def attach(self, name: str, path: str, settings: dict[str, Any]) -> None:
        """Makes a model known, and loads it; one that is loaded already, from there and so set, stays as it is."""
        link, asked = self._directory / name, {"path": path, "settings": settings}
        async with self._turns.setdefault(name, asyncio.Lock()):
            entry = self._pool.get_entry(name)
            if entry is not None and entry.engine is not None and self._asked.get(name) != asked:
                await self._pool._unload_engine(name)
            self._asked[name] = asked
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

    def _place(self, name: str, path: str) -> Path:
        """Where a model is read: confined, this process may not open `path` if it was attached after the start."""
        here = self._served / name if self._served is not None else None
        return here if here is not None and here.is_dir() else Path(path)

    async def detach(self, name: str) -> None:
        """Unloads a model, and forgets it; one that is not there is no trouble."""
        async with self._turns.setdefault(name, asyncio.Lock()):
            (self._directory / name).unlink(missing_ok=True)
            await self._pool._unload_engine(name)
            self._look()

    def _look(self) -> None:
        """Makes the pool find what there is now. What is loaded stays; all are pinned, or oMLX would choose."""
        names = [each.name for each in self._directory.iterdir()]
        self._pool.discover_models([str(self._directory)], names)

    def _apply(self, name: str, settings: dict[str, Any]) -> None:
        """Settings of one model, by the names of oMLX's own `ModelSettings`."""
        manager = self._state.settings_manager
        found = type(manager.get_settings(name))()  # what an earlier one was given is not to stay
        for field, value in {**settings, "is_pinned": True}.items():
            if not hasattr(found, field):
                raise Trouble(400, f"this oMLX has no {field}")
            setattr(found, field, value)
        manager.set_settings(name, found)


class OmlxGate:
    """Stands before oMLX's application (ASGI)."""

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
        """As oMLX wants a request: with its key, and JSON called so, which other engines do not insist on."""
        ours = {b"authorization": f"Bearer {self._key}".encode(), b"content-type": b"application/json"}
        headers = [pair for pair in scope["headers"] if pair[0] not in (*ours, b"x-api-key")]
        return {**scope, "headers": [*headers, *ours.items()]}

    def _current_key(self) -> str:
        """The key that we are asked with: its file, if it was lost, has been made again since the start."""
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
        except (ValueError, AttributeError, RecursionError, Trouble):
            name = ""  # oMLX tells what is wrong with it
        given = False

        async def once() -> dict[str, Any]:
            nonlocal given
            if given:
                return await receive()  # the news that the client is gone
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        self._models.active[name] += 1
        try:
            await self._app(self._with_key(scope), once, send)
        finally:
            self._models.active -= Counter([name])  # without it once it has none: anybody may name anything
        return None

    async def _ours(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        kind, _, name = unquote(scope["path"][len(OURS) :]).partition("/")
        try:
            if scope["method"] == "GET" and kind == "models" and not name:
                return await _answer(send, 200, {"data": self._models.listed()})
            if scope["method"] == "GET" and kind == "slots":
                return await _answer(send, 200, [{"is_processing": self._models.active[name] > 0}])
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self._current_key()}".encode()):
                raise Trouble(401, "the key is wrong")
            if kind != "models" or not name or "/" in name or name.startswith("."):
                raise Trouble(404, "no such thing")
            if scope["method"] == "DELETE":
                await self._models.detach(name)
            elif scope["method"] == "PUT":
                asked = json.loads(await _body(receive))
                await self._models.attach(name, str(asked["path"]), dict(asked.get("settings") or {}))
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
            raise Trouble(413, f"a request may have {gate.MOST_BYTES} bytes")
    return b"".join(parts)


async def _refuse(send: Send, trouble: Trouble) -> None:
    await _answer(send, trouble.args[0], {"error": {"message": trouble.args[1]}})


async def _answer(send: Send, status: int, body: object) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def end(why: str, code: int = EXIT_CANNOT_SERVE) -> None:
    """Ends the process at once, and has the last word; one that waits for a reader must not keep us."""
    OmlxLog.turn.acquire(timeout=1)
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 1)[1]:
            os.write(2, f"omlx_engine: {why}\n".encode("utf-8", "replace"))
    os._exit(code)


def _begin(base: Path, key: str) -> Path:
    """Makes the base path as it is at every start: settings with the key, no models. Returns the models' directory."""
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
    """Serves; ends the process."""
    sys.stdout = sys.stderr = OmlxLog()
    own = {"--key-file": "", "--base-path": "", "--served": ""}
    while len(argv) > 1 and argv[0] in own:
        own[argv[0]], argv = argv[1], argv[2:]
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]  # our modules are not its
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
        end(f"this oMLX is not as it is known here: {why}; install {KNOWN}", EXIT_UNKNOWN)
    uvicorn: Any = importlib.import_module("uvicorn")
    run = uvicorn.run
    uvicorn.run = lambda app, **named: run(
        OmlxGate(app, ServedModels(state, directory, served), key, key_file), **named
    )
    sys.argv = ["omlx", "serve", "--base-path", str(base), "--model-dir", str(directory), *argv]
    try:
        cli.main()
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else EXIT_CANNOT_SERVE)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it cannot serve
        end(f"{type(error).__name__}: {error}"[:1000])
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
