"""Credentials for the API server: the chosen context's token, certificate or plugin, kept current for weeks.

The official client reads a token file once, and becomes anonymous if it gets no credential. Here every credential that
the kubeconfig names must be usable, or the kubeconfig is refused; a replaced file is read again before the next
request; and no exception, log line or status quotes a secret. An error is raised outside the `except` block of its
cause: otherwise the cause, which may quote a secret, stays attached to it as its context.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import ssl
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from urllib3.util.ssl_ import create_urllib3_context

from metal_supervisor.cluster.exec_plugin import Plugin, PluginCredential, PluginFailed
from metal_supervisor.host import authorities, proxies
from metal_supervisor.settings.checks import kubeconfigs
from metal_supervisor.spec.hosts import is_loopback, web_url
from metal_supervisor.spec.types import Json
from metal_supervisor.spec.user_error import UserError
from metal_supervisor.state.kept_files import Edition, edition_of

PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
MOST_BYTES = 1 << 20
FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
"""Fields of a cluster or a user that name a file."""
OF_A_CLUSTER = ("tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression", "extensions")
IMPERSONATION = ("as", "as-uid", "as-groups", "as-user-extra")
log = logging.getLogger(__name__)


class BadKubeconfig(UserError):
    """The kubeconfig cannot be used; the message names the file and says what to do."""


@dataclass(frozen=True)
class Chosen:
    """A context of a kubeconfig, with its cluster and user."""

    file: Path
    """The kubeconfig, or several separated by colons."""
    directory: Path
    """Directory of the kubeconfig that has the user."""
    context: str
    server: str
    cluster: Json = field(repr=False)
    user_name: str
    """"" if the context names none."""
    user: Json = field(repr=False)

    def bad(self, text: str) -> BadKubeconfig:
        return BadKubeconfig(f"kubeconfig {self.file} {text}")

    @property
    def server_name(self) -> str:
        """URL of the server without its path, which may be the embedded API's secret, and without a password."""
        return proxies.without_login(self.server)

    @property
    def token_file(self) -> Path | None:
        """File that the user's token is in, None if none is named."""
        named = self.user.get("tokenFile")
        return self.directory / str(named) if named else None

    @property
    def verified(self) -> bool:
        """True if the server has to show a certificate that is trusted."""
        return not self.cluster.get("insecure-skip-tls-verify", False)

    @property
    def local(self) -> bool:
        """True if the server is on this machine's loopback. One behind a `proxy-url` is on the proxy's own."""
        return not self.cluster.get("proxy-url") and is_loopback(urllib.parse.urlsplit(self.server).hostname or "")

    @property
    def proxy(self) -> str:
        """URL of the proxy to the server, "" for none: `proxy-url`, else the environment's unless it is on loopback."""
        if written := self.cluster.get("proxy-url"):
            return str(written)
        return "" if self.local else proxies.proxy_for(self.server, urllib.request.getproxies())

    @property
    def first_hop(self) -> str:
        """URL of the host that connections are made to: the proxy, or the server."""
        return self.proxy or self.server

    def pem(self, entry: Json, name: str) -> Callable[[], bytes]:
        """Return a function for the PEM that an entry holds or names, b"" if it does neither. Raises BadKubeconfig."""
        found = b""
        if data := entry.get(f"{name}-data"):
            with contextlib.suppress(ValueError):
                found = base64.b64decode("".join(str(data).split()), validate=True)
            if not _is_pem(found):
                raise self.bad(f"cannot be used: its {name}-data is not PEM in base64")
        elif named := entry.get(name):
            file = _File(Path(named), _is_pem)
            if not file():
                raise self.bad(f"names {named}, which is not PEM")
            return file
        return lambda: found

    def inlined(self, entry: Json, name: str) -> Json:
        """`NAME-data` for the PEM of an entry, {} if it has none. Raises BadKubeconfig."""
        found = self.pem(entry, name)()
        return {f"{name}-data": base64.b64encode(found + b"\n").decode()} if found else {}

    def cluster_info(self, server: str = "") -> Json:
        """The cluster, at another URL if `server` is one, with its authority inlined. Raises BadKubeconfig."""
        info: Json = {"server": server or self.server}
        info |= {name: self.cluster[name] for name in OF_A_CLUSTER if name in self.cluster}
        return info | self.inlined(self.cluster, "certificate-authority")


@dataclass(frozen=True)
class ClusterAccess:
    """Credentials for a request and its connection at one moment. Two that are equal are the same login."""

    authorization: str = field(default="", repr=False)
    """Value of the Authorization header, "" for none."""
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    """PEM of the trusted authorities, b"" for those of the system."""

    @property
    def tls(self) -> tuple[bytes, bytes, bytes]:
        """TLS material of a connection; a change needs new connections."""
        return self.certificate, self.key, self.authority

    @property
    def secret(self) -> str:
        """Text that must never be shown, "" if there is none."""
        return self.authorization.partition(" ")[2]


def choose(file: Path, context: str = "") -> Chosen:
    """Read a context from a kubeconfig, the current one by default. Raises BadKubeconfig.

    Several files are merged as kubectl merges $KUBECONFIG: missing files are skipped, and the first file that has an
    entry, or a current-context, has the whole of it.
    """
    # Not Path.is_file, which raises for a directory that is closed to this user.
    contents = {each: _content(each) for each in kubeconfigs(str(file)) if os.path.isfile(each)}  # noqa: PTH113
    if not contents:
        raise BadKubeconfig(f"kubeconfig {file} does not exist; check --kubeconfig")
    name = str(context or next(filter(None, (each.get("current-context") for each in contents.values())), ""))
    if not name:
        raise BadKubeconfig(f"kubeconfig {file} has no current-context; set --context")

    def named(kind: str, wanted: object) -> tuple[Json, Path]:
        """The entry of the first kubeconfig that has the name, and the directory of that file."""
        for each, content in contents.items():
            listed = content.get(f"{kind}s")
            for entry in listed if isinstance(listed, list) else []:
                if isinstance(entry, dict) and entry.get("name") == wanted:
                    found = entry.get(kind) or {}
                    if isinstance(found, dict):
                        return _placed(found, each), each.parent
        text = f' has no context "{name}"; check --context'
        if kind != "context":
            text = f': context "{name}" names {kind} "{wanted}", which does not exist'
        raise BadKubeconfig(f"kubeconfig {file}{text}")

    chosen, _ = named("context", name)
    cluster, _ = named("cluster", chosen.get("cluster"))
    user_name = chosen.get("user") or ""
    user, directory = named("user", user_name) if user_name else ({}, next(iter(contents)).parent)
    server = cluster.get("server")
    if not isinstance(server, str) or web_url(server) is None:
        raise BadKubeconfig(f"kubeconfig {file}: the cluster's server must be an http(s) URL")
    if not isinstance(cluster.get("insecure-skip-tls-verify", False), bool):
        raise BadKubeconfig(f"kubeconfig {file}: insecure-skip-tls-verify must be true or false")
    if (proxy := cluster.get("proxy-url")) and not (isinstance(proxy, str) and proxies.is_proxy(proxy)):
        raise BadKubeconfig(
            f"kubeconfig {file}: proxy-url must be a URL such as http://HOST:PORT or socks5://HOST:PORT"
        )
    return Chosen(file, directory.absolute(), name, server.rstrip("/"), cluster, str(user_name), user)


def _content(file: Path) -> Json:
    """Content of a kubeconfig. Raises BadKubeconfig with the kind of an error alone: its text may quote a secret."""
    content: Any = None
    problem = "it holds no settings"
    try:
        text = file.read_text("utf-8")
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            import yaml  # takes 9 ms, and a kubeconfig that we wrote is JSON

            content = yaml.safe_load(text)
    except OSError as error:
        problem = error.strerror or type(error).__name__
    except Exception as error:  # noqa: BLE001 - YAML has errors of its own, besides Python's
        mark = getattr(error, "problem_mark", None)
        problem = f"it is no YAML ({type(error).__name__}{f' in line {mark.line + 1}' if mark else ''})"
    if isinstance(content, dict):
        return content
    raise BadKubeconfig(f"kubeconfig {file} cannot be used: {problem}")


def _placed(entry: Json, file: Path) -> Json:
    """An entry of a kubeconfig with absolute paths of the files it uses. Raises BadKubeconfig if one is missing."""
    found = dict(entry)
    for name in FILES:
        if entry.get(name) and not entry.get(f"{name}-data"):
            path = os.path.normpath(file.absolute().parent / str(entry[name]))
            if not os.path.isfile(path):  # noqa: PTH113
                text = f"names {path} ({name}), which does not exist, or is closed to this user"
                raise BadKubeconfig(f"kubeconfig {file} {text}")
            found[name] = path
    return found


class _File:
    """Content of a file, read again when it has changed; the last usable content if the new one is not."""

    def __init__(self, path: Path, usable: Callable[[bytes], bool]) -> None:
        self._path, self._usable = path, usable
        self._edition: Edition | None = None
        self._content = b""

    def __call__(self) -> bytes:
        edition = edition_of(self._path)
        if edition == self._edition:
            return self._content
        try:
            with self._path.open("rb") as file:
                content = file.read(MOST_BYTES).strip()
        except OSError:
            return self._content  # it may be in the middle of being replaced
        if self._usable(content):
            self._content = content
        elif self._content:
            log.warning("file is not usable; what it held before stays", extra={"file": str(self._path)})
        self._edition = edition
        return self._content


def _is_token(content: bytes) -> bool:
    """True if the bytes can be a header's value as they are."""
    return re.fullmatch(rb"[\x21-\x7e]+", content) is not None


def _is_pem(content: bytes) -> bool:
    return b"-----BEGIN " in content


class Login:
    """Login of a context: its user's credentials and the trusted authorities. `current()` returns those to use now."""

    def __init__(self, chosen: Chosen, previous: Login | None = None) -> None:
        """`previous`: an earlier login, whose plugin is reused if it is the same. Raises BadKubeconfig."""
        self._chosen, user = chosen, chosen.user
        self._plugin: Plugin | None = None
        self._authority = chosen.pem(chosen.cluster, "certificate-authority")
        self._certificate = chosen.pem(user, "client-certificate")
        self._key = chosen.pem(user, "client-key")
        if bool(self._certificate()) != bool(self._key()):
            raise chosen.bad("has only one of client-certificate and client-key; it takes both")
        if "auth-provider" in user:
            text = "uses an auth-provider, which cannot be renewed unattended; use a token or exec plugin (kubelogin)"
            raise chosen.bad(text)
        if any(user.get(name) for name in IMPERSONATION):
            raise chosen.bad(f'lets user "{chosen.user_name}" act as another (as:), which is not supported')
        self._authorization = self._header(user, previous)
        self._require(self.current())

    def current(self) -> ClusterAccess:
        """Credentials to send now; waits only for a plugin whose last credential has expired. Raises nothing."""
        given = self._plugin.current() if self._plugin else PluginCredential()
        certificate, key = self._certificate(), self._key()
        if given.certificate:
            certificate, key = given.certificate, given.key
        authorization = f"Bearer {given.token}" if given.token else self._authorization()
        return ClusterAccess(authorization, certificate, key, self._authority())

    @property
    def advice(self) -> str:
        """Advice for a user when the server refuses the credentials."""
        if self._plugin:
            return f"the credentials of {self._plugin.name} are refused; log in again with it; it is run again"
        return "the credentials are refused; renew the token or certificate of the kubeconfig; it is read again"

    def _require(self, access: ClusterAccess) -> None:
        """Raise BadKubeconfig if there is no credential. Anonymous access is allowed only over http to this machine, in
        a context without a user.
        """
        plain = self._chosen.server.startswith("http:")
        if plain and access.certificate and not access.authorization:
            raise self._chosen.bad("has a client certificate, which an http server cannot be shown")
        if access.authorization or access.certificate:
            return
        if self._chosen.user or not (plain and self._chosen.local):
            who = f'user "{self._chosen.user_name}"' if self._chosen.user_name else "its context"
            raise self._chosen.bad(f"has no credential for {who}; give it a token, tokenFile, certificate or exec")

    def _header(self, user: Json, previous: Login | None) -> Callable[[], str]:
        """Return a function for the Authorization header's value. Raises BadKubeconfig.

        The order is kubectl's: a token file comes before a token, which may be an old copy of it.
        """
        bad = self._chosen.bad
        if path := self._chosen.token_file:
            file = _File(path, _is_token)
            if not file():
                raise bad(f"names {path}, which holds no token: it is empty, or no header can hold it")
            return lambda: f"Bearer {file().decode()}"
        if user.get("token"):
            token = str(user["token"]).strip()
            if not _is_token(token.encode("utf-8", "surrogatepass")):
                raise bad("holds a token with characters that no header can hold; renew it")
            return lambda: f"Bearer {token}"
        if user.get("exec"):
            self._plugin = self._run_plugin(user["exec"], previous)
        elif user.get("username"):
            try:
                pair = f"{user['username']}:{user.get('password') or ''}".encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                raise bad("holds a username or password with characters that no header can hold") from None
            basic = "Basic " + base64.b64encode(pair).decode()
            return lambda: basic
        return lambda: ""

    def _run_plugin(self, spec: Json, previous: Login | None) -> Plugin:
        problem = ""
        try:
            plugin = Plugin(spec, self._chosen.directory, self._cluster_info(spec))
            before = previous._plugin if previous else None
            if before is not None and before.entry == plugin.entry:
                before.renew()
                return before
            plugin.start()
            return plugin
        except PluginFailed as error:
            problem = str(error)
        raise self._chosen.bad(f"cannot be used: {problem}")

    def _cluster_info(self, spec: object) -> Json | None:
        """Cluster info for a plugin, in the names of the ExecCredential format; None if it does not ask for it."""
        if not isinstance(spec, dict) or spec.get("provideClusterInfo") is not True:
            return None
        info = self._chosen.cluster_info()
        for each in info.pop("extensions", None) or []:
            if isinstance(each, dict) and each.get("name") == "client.authentication.k8s.io/exec":
                info["config"] = each.get("extension")
        return info


def proxy_context(access: ClusterAccess, verify: bool) -> ssl.SSLContext:
    """Create a TLS context for an https proxy, whose certificate is public or from the cluster's authority."""
    context = tls_context(ClusterAccess(), verify)
    if access.authority:
        context.load_verify_locations(cadata=access.authority.decode("ascii", "ignore"))
    return context


def tls_context(access: ClusterAccess, verify: bool) -> ssl.SSLContext:
    """Create a TLS context with these credentials. Raises ssl.SSLError or OSError if they do not fit together.

    Python loads a key only from a file: it is written to a private temporary directory, and deleted right after it is
    loaded. So nothing breaks if /tmp is cleaned.
    """
    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED if verify else ssl.CERT_NONE)
    if access.authority:
        context.load_verify_locations(cadata=access.authority.decode("ascii", "ignore"))
    elif verify and (trusted := authorities.file_instead()):
        context.load_verify_locations(trusted)
    elif verify:
        context.load_default_certs()
    if access.certificate:
        with tempfile.TemporaryDirectory(prefix="metal-supervisor-") as directory:  # 0700
            pair = Path(directory) / "pair.pem"
            with open(os.open(pair, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(access.certificate + b"\n" + access.key + b"\n")
            context.load_cert_chain(pair, password=lambda: "")  # an encrypted key fails instead of asking
    return context
