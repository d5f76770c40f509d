"""The formula of Homebrew: each wheel with its digest, and nothing that Ruby would take for more than text.

The release workflow has ruby look at a real one.
"""

from __future__ import annotations

from typing import Any

import pytest
from formula import formula

URL = "https://github.com/o/r/releases/download/v1.0/metal_supervisor-1.0-py3-none-any.whl"
DIGEST = "0" * 64


def report(**changes: Any) -> dict[str, Any]:
    """As pip writes one."""
    url = changes.get("url", "https://files.example/b-2-py3-none-any.whl")
    one = {"url": url, "archive_info": {"hashes": {"sha256": changes.get("sha256", "1" * 64)}}}
    other = {"url": "https://files.example/a-1-py3-none-any.whl", "archive_info": {"hashes": {"sha256": "2" * 64}}}
    return {
        "install": [
            {"metadata": {"name": changes.get("name", "b")}, "download_info": one},
            {"metadata": {"name": "A"}, "download_info": other},
        ]
    }


def test_it_has_the_release_and_every_wheel_with_its_digest() -> None:
    made = formula(report(), URL, DIGEST)
    assert made.index(URL) < made.index('resource "A"') < made.index('resource "b"') < made.index("def install")
    assert all(f'sha256 "{each * 64}"' in made for each in "012") and 'homepage "https://github.com/o/r"' in made


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 'b"; system "x'},
        {"name": "#{x}"},
        {"url": "https://h/#{x}.whl"},
        {"sha256": "1" * 63},
        {"sha256": "g" * 64},
    ],
)
def test_what_ruby_would_run_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"formula|SHA-256"):
        formula(report(**changes), URL, DIGEST)


@pytest.mark.parametrize("url", ["http://h/x.whl", "https://h/x.tar.gz", 'https://h/".whl'])
def test_only_a_wheel_by_https_is_a_release(url: str) -> None:
    with pytest.raises(ValueError, match=r"wheel|formula"):
        formula(report(), url, DIGEST)
