"""A real Prometheus and its promtool, for tests of what they make of our metrics, alerts and dashboard."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support import parts
from tests.support.finders import find_prometheus
from tests.support.system import eventually, free_ports


def program(name: str) -> str:
    """The absolute path of `prometheus` or `promtool`."""
    return str(parts.found(find_prometheus.find) / "usr" / "bin" / name)


def lint(text: str) -> str:
    """What `promtool check metrics` finds wrong with a page, "" if nothing."""
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text.encode(), capture_output=True, timeout=60
    )
    said = (done.stdout + done.stderr).decode()
    return said or (f"exit status {done.returncode}" if done.returncode else "")


def lint_ours(text: str) -> str:
    """The same without what is only unusual about the names of engines, which are theirs."""
    ours = "metal_supervisor_", "llmkube_metal_agent_", "error", "exit status"
    return "\n".join(line for line in lint(text).splitlines() if line.startswith(ours))


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression, now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def scraped(self) -> bool:
        """Whether its targets have all been scraped, and well."""
        targets = self.get("targets")["activeTargets"]
        return bool(targets) and all(each["health"] == "up" for each in targets)


@contextlib.contextmanager
def prometheus(base: Path, jobs: Mapping[str, Sequence[int]], rules: Path) -> Iterator[Prometheus]:
    """A Prometheus that has scraped these ports of this machine, by the names of their jobs, and goes on to."""
    (own,) = free_ports(1)
    conf = base / "prometheus.yml"
    conf.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [
                    {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
                    for job, ports in jobs.items()
                ],
            }
        )
    )
    command = [
        program("prometheus"),
        f"--config.file={conf}",
        f"--storage.tsdb.path={base / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{own}",
        "--log.level=warn",
    ]
    with (base / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        server = Prometheus(own)
        eventually(server.scraped, 30, f"a scrape; {(base / 'prometheus.log').read_text()}")
        yield server
    finally:
        process.terminate()
        process.wait(30)
