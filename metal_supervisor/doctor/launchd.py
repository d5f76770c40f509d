"""Checks of the launchd job that keeps supervisord up, and of LLMKube's agent, which would write the same objects."""

from __future__ import annotations

from metal_supervisor.doctor.findings import Check, Finding, Found, fail, ok, unknown, warn
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.host import launchd
from metal_supervisor.host.launchctl import EX_CONFIG, LAUNCHCTL, Launchctl, LaunchdError, LoadedJob
from metal_supervisor.host.launchd import INCUMBENT, LABEL

NEVER_EXITED = ("(never exited)", "")
INSTALL = "metal-supervisor install, as a LaunchDaemon: it starts with the Mac, and may reach the local network"
RENEW = "then metal-supervisor install, which loads the file anew: launchd reads it only then"


def judge_job(domain: str, job: LoadedJob, stop_s: float) -> list[Finding]:
    """Findings about our job. `stop_s`: longest time to stop the system, by its settings."""
    where = f"{domain}/{LABEL}"
    found: list[Finding] = []
    ended = job.state != "running"  # else it is of no account what an earlier start has ended with
    if ended and job.last_exit.partition(":")[0] == EX_CONFIG:
        text = f"{where} cannot be started (78: EX_CONFIG): launchd could not open its log, or its user is unknown"
        found.append(fail(text, f"make the directory of its log, owned by that user; {RENEW}"))
    elif ended:
        last = f", last exit {job.last_exit}" if job.last_exit not in NEVER_EXITED else ""
        text = f"{where} is {job.state or 'in an unknown state'} after {job.runs} starts{last}"
        found.append(fail(text, "see log/launchd.log and log/supervisord.log in the state directory"))
    if job.spawn_type and not job.spawn_type.startswith("interactive"):
        text = f"{where} is started as {job.spawn_type}: macOS slows the engines down to efficiency cores"
        found.append(fail(text, f"ProcessType Interactive in its file; {RENEW}"))
    if job.exit_timeout_s is not None and job.exit_timeout_s < stop_s:
        text = f"{where} is killed {job.exit_timeout_s} s after it is told to stop, and takes up to {stop_s:.0f} s"
        found.append(warn(text, f"a longer ExitTimeOut, or a shorter --stop-timeout; {RENEW}"))
    if domain != "system":
        text = f"{where} is an agent of a login session: it starts only after a login, and the LAN may be closed to it"
        found.append(warn(text, INSTALL))
    return found or [ok(f"{where} runs, pid {job.pid}, {job.spawn_type or 'spawn type not told'}")]


def _jobs(around: Surroundings) -> Found:
    loaded, unasked = _loaded(around, LABEL)
    if not loaded:
        return unasked or warn("no launchd job: after a restart of this Mac nothing of it starts by itself", INSTALL)
    stop_s = launchd.exit_timeout_s(around.settings.stop_timeout)
    found = [finding for domain, job in loaded for finding in judge_job(domain, job, stop_s)]
    if len(loaded) > 1:
        text = f"it is loaded twice, in {' and '.join(domain for domain, _ in loaded)}: only one of them can run"
        found.append(fail(text, f"{LAUNCHCTL} bootout {loaded[-1][0]}/{LABEL}"))
    return [*found, *unasked]


def _incumbent(around: Surroundings) -> Found:
    """LLMKube's own agent."""
    loaded, unasked = _loaded(around, INCUMBENT)
    if not loaded:
        return unasked or ok("no other agent is loaded")
    domains = [domain for domain, _ in loaded]
    jobs = [f"{each}/{INCUMBENT}" for each in domains]
    text = f"LLMKube's metal-agent is loaded too ({', '.join(jobs)}): both would run the same services"
    stop = "; ".join(f"{LAUNCHCTL} disable {job} && {LAUNCHCTL} bootout {job}" for job in jobs)
    return [fail(text, f"{stop}{' (with sudo)' if 'system' in domains else ''}"), *unasked]


def _loaded(around: Surroundings, label: str) -> tuple[list[tuple[str, LoadedJob]], list[Finding]]:
    """([(domain, job of that label loaded in it)], findings about domains that cannot be queried)."""
    jobs, unasked = [], []
    for domain in ("system", f"gui/{around.uid}"):
        try:
            if job := Launchctl(around.run, domain).job(label):
                jobs.append((domain, job))
        except LaunchdError as error:
            unasked.append(unknown(str(error)))
    return jobs, unasked


CHECKS = (
    Check("launchd", _jobs, mac=True),
    Check("other agent", _incumbent, mac=True),
)
