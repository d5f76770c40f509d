"""The property list for launchd: complete, of the right types, and nobody's name can break it."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from metal_supervisor.host.launchd import LABEL, OF_A_DAEMON, Job, rendered
from metal_supervisor.settings.loader import launchd_dir
from tests.support.launchd import KEYS, problems

TEMPLATE = launchd_dir() / "dev.metal-supervisor.plist"


def job(**more: object) -> Job:
    usual = {"user": "anna", "group": "staff", "home": "/Users/anna", "state": "/Users/anna/.metal-supervisor"}
    return Job(**{**usual, "stop_timeout_s": 20.0, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("agent", [False, True])
def test_it_has_what_launchd_needs_and_nothing_that_it_would_refuse(agent: bool) -> None:
    content = plistlib.loads(rendered(TEMPLATE.read_bytes(), job(agent=agent)))
    assert problems(content) == []
    assert KEYS.keys() - content.keys() == (set(OF_A_DAEMON) if agent else set())
    assert content["ProcessType"] == "Interactive" and "Nice" not in content
    assert content["ExitTimeOut"] == 120
    path = content["EnvironmentVariables"]["PATH"].split(":")
    assert path[0] == "/opt/homebrew/bin" and path[-1] == "/sbin" and "/Users/anna/.local/bin" in path


def test_a_trial_beside_a_real_installation_has_a_name_of_its_own() -> None:
    assert plistlib.loads(rendered(TEMPLATE.read_bytes(), job()))["Label"] == LABEL
    assert plistlib.loads(rendered(TEMPLATE.read_bytes(), job(label=f"{LABEL}.trial")))["Label"] == f"{LABEL}.trial"


def test_the_time_to_end_in_order_follows_the_setting() -> None:
    assert plistlib.loads(rendered(TEMPLATE.read_bytes(), job(stop_timeout_s=600.0)))["ExitTimeOut"] == 700


@pytest.mark.parametrize("name", ["R&D <x>", "]]>", 'o"brien', "ünï", "@HOME@", "$(id)"])
def test_names_are_text_whatever_is_in_them(name: str) -> None:
    text = rendered(TEMPLATE.read_bytes(), job(state=f"/Users/{name}/s"))
    assert plistlib.loads(text)["WorkingDirectory"] == f"/Users/{name}/s"


def test_a_template_with_a_place_that_nobody_knows_is_refused() -> None:
    with pytest.raises(KeyError, match="@NOBODY@"):
        rendered(TEMPLATE.read_bytes().replace(b"@USER@", b"@NOBODY@"), job())


@pytest.mark.skipif(shutil.which("xmllint") is None, reason="no xmllint here; apt-get install libxml2-utils")
def test_another_reader_of_xml_takes_it_too(tmp_path: Path) -> None:
    for path, content in ((TEMPLATE, b""), (tmp_path / "job.plist", rendered(TEMPLATE.read_bytes(), job()))):
        if content:
            path.write_bytes(content)
        done = subprocess.run(["xmllint", "--noout", "--nonet", str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
