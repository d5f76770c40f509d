"""docs/settings.md says of every setting what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import settings_page

from metal_supervisor.settings import loader

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_that_of_the_settings_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "tools/settings_page.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_that_is_not_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_page, "PAGE", tmp_path / "settings.md")
    monkeypatch.setattr(settings_page, "SAMPLE", tmp_path / "sample.toml")
    monkeypatch.setattr(sys, "argv", ["settings_page.py"])
    assert settings_page.main() == 0
    settings_page.PAGE.write_text(settings_page.PAGE.read_text() + "\n")
    monkeypatch.setattr(sys, "argv", ["settings_page.py", "--check"])
    assert settings_page.main() == 1


@pytest.mark.parametrize("name", loader.FIELDS)
def test_what_a_setting_may_be_is_told_and_its_default_is_of_it(name: str) -> None:
    check = loader.FIELDS[name].metadata["check"]
    assert settings_page.allowed(name)
    assert check is None or check(loader.FIELDS[name].default) is None


def test_when_a_change_counts_is_told_of_settings_that_there_are() -> None:
    assert settings_page.AT_ENGINES_START | settings_page.OTHERWISE.keys() <= loader.FIELDS.keys()


def test_bounds_and_choices_are_there() -> None:
    assert settings_page.allowed("downloads") == "between 1 and 64"
    assert settings_page.allowed("claims") == "one of auto, off"
    assert settings_page.allowed("preemption") == "true, false"
