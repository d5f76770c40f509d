"""A real Prometheus and its promtool, for tests of what they make of our metrics, alerts and dashboard."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support import parts
from tests.support.finders import find_prometheus
from tests.support.system import ROOT, eventually, free_ports

CONF = ROOT / "conf" / "prometheus" / "prometheus.yml"
JOB = "metal-supervisor"


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
        """True once all Macs have been scraped successfully."""
        targets = [each for each in self.get("targets")["activeTargets"] if each["labels"]["job"] == JOB]
        return bool(targets) and all(each["health"] == "up" for each in targets)


def jobs(address: str, *others: str) -> list[dict[str, Any]]:
    """The scrape_configs of conf/prometheus for a Mac at this address; `others`: addresses of other pages."""
    found: list[dict[str, Any]] = yaml.safe_load(CONF.read_text().replace("192.0.2.10:9091", address))["scrape_configs"]
    macs, engines = found
    macs["static_configs"][0]["targets"] += others
    engines["http_sd_configs"][0]["refresh_interval"] = "1s"
    for each in found:
        del each["scrape_interval"]
    return found


@contextlib.contextmanager
def prometheus(base: Path, scrape_configs: Sequence[dict[str, Any]], rules: Path) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the Macs of these jobs, and scrapes all jobs each second."""
    (own,) = free_ports(1)
    conf = base / "prometheus.yml"
    conf.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": list(scrape_configs),
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
