"""Checks of the access to the API server: the kubeconfig, the expiry of its credential, and the connection.

Each kind of failure has its own fix. The one that costs people days is macOS's Local Network privacy: an agent of a
login session gets "No route to host" for everything on the LAN, and so does what another terminal than Apple's starts,
while the same command works in Terminal.
"""

from __future__ import annotations

import errno
import socket
import time
import urllib.parse
from functools import partial

from metal_supervisor.cluster.accounts import Token, read_token
from metal_supervisor.cluster.answers import KubeError
from metal_supervisor.cluster.credentials import BadKubeconfig, Login
from metal_supervisor.doctor import expiry
from metal_supervisor.doctor.findings import Check, Finding, Found, fail, ok, warn
from metal_supervisor.doctor.software import FOR_GOOD
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.doctor.together import answers
from metal_supervisor.host.proxies import without_login
from metal_supervisor.settings.loader import start_command
from metal_supervisor.spec.instants import utc

SOON_S = 3 * 86400.0
ANSWER_S = 4.0
"""Time limit for login and answer together: below that of the check, which can still report which of them failed."""
NO_ROUTE_ON_A_MAC = 65
PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
LOGIN_BY_HAND = "run the kubeconfig's exec plugin by hand: is it logged in, does it wait for a browser or the network?"
LOCAL_NETWORK = (
    "best first: install as a LaunchDaemon, which is exempt; use the API server's tailnet address; put the API server "
    "behind the gateway; tunnel with /usr/bin/ssh -N -L 6443:HOST:6443 and the server https://127.0.0.1:6443; allow it "
    "in System Settings > Privacy & Security > Local Network; start it from the terminal that is Apple's, or by SSH"
)


def _kubeconfig(around: Surroundings) -> Found:
    if around.settings.embedded and not around.settings.kubeconfig_path.exists() and around.table() is None:
        return []  # written at each start
    try:
        chosen = around.chosen()
    except BadKubeconfig as error:
        again = "stop the system, and start it again: that writes it anew"
        return fail(str(error), again if around.settings.embedded else "correct --kubeconfig or --context, or the file")
    where = "the embedded API" if around.settings.embedded else f"context {chosen.context} of {chosen.file}"
    return ok(f"{where}, server {chosen.server_name}")


def judge_token(token: Token, now: float) -> Finding:
    """Finding about a ServiceAccount's token in a file, which this Mac renews. `now`: Unix time."""
    who = f"the token of {token.namespace}/{token.account}"
    if token.expires <= now:
        fix = f"metal-supervisor kubeconfig --service-account {token.account} --namespace {token.namespace} --force …"
        return fail(f"{who} expired at {utc(token.expires)}", fix)
    if token.due < now:
        text = f"{who} should have been renewed at {utc(token.due)}, and expires at {utc(token.expires)}"
        return warn(text, "the sidecar's log tells why not; rights tells if it may")
    return ok(f"{who} holds until {utc(token.expires)}, and is renewed at {utc(token.due)}")


def judge_expiry(what: str, expires: float | None, now: float) -> Finding:
    """Finding about a credential that nothing renews. `expires`, `now`: Unix time; None if it has no expiry."""
    if expires is None:
        return ok(f"{what}, which does not say until when it holds")
    if expires <= now:
        return fail(f"{what} expired at {utc(expires)}", "renew it, and put it into the kubeconfig; it is read again")
    if expires - now < SOON_S:
        text = f"{what} expires at {utc(expires)}, and nothing renews it"
        return warn(text, "renew it; or give this Mac a token that it renews itself: metal-supervisor kubeconfig")
    return ok(f"{what} holds until {utc(expires)}")


def _credential(around: Surroundings) -> Found:
    """The credential of the context's user, from its plugin or the files it names. Raises OSError."""
    if around.settings.embedded:
        return []
    try:
        chosen = around.chosen()
    except BadKubeconfig:
        return []  # reported by the check `kubeconfig`
    user, now = chosen.user, around.clock()
    if chosen.token_file:
        text = chosen.token_file.read_text("ascii").strip()
        token = read_token(text)
        return judge_token(token, now) if token else judge_expiry("a token", expiry.of_token(text), now)
    if user.get("token"):
        return judge_expiry("a token", expiry.of_token(str(user["token"])), now)
    if isinstance(user.get("exec"), dict):
        command = f"{user['exec'].get('command')!s:.100}"
        try:
            answers([partial(Login, chosen)], ANSWER_S)
        except TimeoutError:
            return warn(f"{command} took longer than {ANSWER_S:g} s", LOGIN_BY_HAND)
        except BadKubeconfig as error:
            return fail(str(error), LOGIN_BY_HAND)
        return ok(f"from {command}, which runs again when it expires")
    if user.get("client-certificate-data") or user.get("client-certificate"):
        return judge_expiry(
            "a client certificate", expiry.of_certificate(chosen.pem(user, "client-certificate")()), now
        )
    return ok("a user name and password" if user.get("username") else "none")


def judge_connection(server: str, error: OSError, on_mac: bool) -> Finding:
    """Finding about a TCP connection that failed with `error`."""
    if on_mac and error.errno in (NO_ROUTE_ON_A_MAC, errno.EHOSTUNREACH):
        text = (
            f"{server}: No route to host (65). If it answers in Apple's Terminal, macOS's Local Network privacy "
            "blocks this program: an agent of a login session, or a terminal that is not Apple's, needs leave for it"
        )
        return fail(text, LOCAL_NETWORK)
    if isinstance(error, socket.gaierror):
        return fail(f"{server}: its name is not known here ({error.strerror})", "check the name, the DNS, the VPN")
    if isinstance(error, ConnectionRefusedError):
        text = f"{server}: connection refused: the machine is there, and nothing listens on that port"
        fix = "start the cluster (minikube start, colima start …), or correct server and proxy-url in the kubeconfig"
        return fail(text, fix)
    if isinstance(error, TimeoutError):
        text = f"{server} does not answer in time: something between drops the packets, or the machine is off"
        return fail(text, "check VPN, firewall and the cluster's allowed networks")
    fix = "connect to a network that leads there; check the VPN, and the server's address"
    return fail(f"{server}: {error.strerror or type(error).__name__}", fix)


def judge_answer(server: str, error: KubeError) -> Finding:
    """Finding about a server that answered with an error."""
    if error.reason == "Untrusted":
        fix = "put the cluster's certificate-authority-data into the kubeconfig, or use the name it is issued for"
        return fail(f"{server}: {error.message.partition(': ')[2] or error.message}", fix)
    if error.code == 401:
        return fail(f"{server} answers, and does not know who we are: {error.message}", "renew the credential")
    if error.code == 403:
        return warn(f"{server} answers, and refuses even to tell its version: {error.message}", "see rights")
    if error.code:
        text = f"{server} answers {error.code}: {error.message}"
        return fail(text, "is it a Kubernetes API? check the server in the kubeconfig")
    return fail(error.message, "check the server in the kubeconfig, and what is between (proxy-url, TLS)")


def _embedded(around: Surroundings) -> Finding:
    """Finding about the embedded API that does not answer: only a warning if that is because the system is down."""
    table = around.table()
    if table is None:
        start = start_command(around.settings.state_path)
        return warn("the embedded API does not answer: the system does not run", f"start it with `{start}`, {FOR_GOOD}")
    state = table["apiserver"].state.value if "apiserver" in table else "missing"
    text = f"the embedded API does not answer: supervisord runs, and has apiserver as {state}"
    return fail(text, f"see {around.directory.log_path('apiserver')}")


def _api(around: Surroundings) -> Found:
    link, embedded = around.link, around.settings.embedded
    if embedded and not around.settings.kubeconfig_path.exists():
        return _embedded(around)
    try:
        chosen = around.chosen()
        server = chosen.server_name
        hop, parts = server, urllib.parse.urlsplit(chosen.first_hop)
        if chosen.proxy:
            hop = f"{without_login(chosen.proxy)}, the proxy to {server}"
        around.connect(str(parts.hostname), parts.port or PORTS[parts.scheme])
    except BadKubeconfig:
        link.problem = "the kubeconfig cannot be used"
        return fail("not asked: the kubeconfig cannot be used", "see kubeconfig")
    except OSError as error:
        return _embedded(around) if embedded else judge_connection(hop, error, around.on_mac)
    until = time.monotonic() + ANSWER_S
    try:
        (kube,) = answers([partial(around.login, around.settings.kubeconfig_path, around.settings.context)], ANSWER_S)
    except TimeoutError:
        text = f"the login took longer than {ANSWER_S:g} s, so the server was not asked"
        return warn(text, LOGIN_BY_HAND)
    except BadKubeconfig as error:
        link.problem = "there is no login"
        return fail(f"not asked: {error}", "correct the user of that context, or what it names")
    try:
        (said,) = answers([partial(kube.request, "GET", "/version")], until - time.monotonic())
        link.kube = kube
    except TimeoutError:
        text = f"{server} accepts connections, and then says nothing"
        return fail(text, "is it a Kubernetes API? a tunnel or forwarded port whose other end is gone looks like this")
    except KubeError as error:
        if error.code == 403:
            link.kube = kube
        return judge_answer(server, error)
    return ok(f"{server} answers, Kubernetes {said.get('gitVersion') or 'of no version'}")


CHECKS = (
    Check("kubeconfig", _kubeconfig),
    Check("credential", _credential),
    Check("api", _api),
)
