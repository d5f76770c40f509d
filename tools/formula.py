"""Prints a formula of Homebrew for a release: its wheel, and the wheels of requirements.txt, by address and digest.

    pip install --dry-run --ignore-installed --report report.json --require-hashes --only-binary :all: \\
      --platform macosx_14_0_arm64 --python-version 3.13 --target unused -r requirements.txt
    python tools/formula.py report.json URL SHA256 > metal-supervisor.rb

The release workflow does it; the formula is not kept here, because it names what was published.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PYTHON = "3.13"
HEAD = """\
class MetalSupervisor < Formula
  desc "Run Kubernetes' language models natively on a Mac"
  homepage "{home}"
  url "{url}", using: :nounzip
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on "llama.cpp"
  depends_on :macos
  depends_on "python@{python}"
"""
RESOURCE = """
  resource "{name}" do
    url "{url}", using: :nounzip
    sha256 "{sha256}"
  end
"""
TAIL = """
  def install
    python = Formula["python@{python}"].opt_libexec/"bin/python"
    system python, "-m", "venv", "--without-pip", libexec
    pip = [python, "-m", "pip", "--python", libexec/"bin/python", "install", "--no-deps", "--no-index"]
    resources.each {{ |wheel| wheel.stage {{ system(*pip, *Dir["*.whl"]) }} }}
    system(*pip, *Dir["*.whl"])
    bin.install_symlink libexec/"bin/metal-supervisor"
  end

  test do
    system bin/"metal-supervisor", "version"
  end
end
"""
_PLAIN = re.compile(r"[A-Za-z0-9._:/+%@~-]+")


def formula(report: dict[str, Any], url: str, sha256: str) -> str:
    """The formula, from what pip reports that it would install. Raises ValueError for what no formula may hold."""
    if not re.fullmatch(r"https://[^/]+/.+\.whl", url):
        raise ValueError(f"{url} is no address of a wheel")
    home = url.partition("/releases/")[0]
    head = HEAD.format(home=_plain(home), url=_plain(url), sha256=_digest(sha256), python=PYTHON)
    return head + "".join(_resources(report)) + TAIL.format(python=PYTHON)


def _resources(report: dict[str, Any]) -> Iterator[str]:
    for each in sorted(report["install"], key=lambda one: one["metadata"]["name"].lower()):
        found = each["download_info"]
        digest = found["archive_info"]["hashes"]["sha256"]
        yield RESOURCE.format(name=_plain(each["metadata"]["name"]), url=_plain(found["url"]), sha256=_digest(digest))


def _plain(text: str) -> str:
    """The text, which needs no quoting in Ruby. Raises ValueError."""
    if not _PLAIN.fullmatch(text):
        raise ValueError(f"{text!r:.80} cannot stand in a formula")
    return text


def _digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError(f"{text!r:.80} is no SHA-256")
    return text


if __name__ == "__main__":
    _, path, its_url, its_sha256 = sys.argv
    sys.stdout.write(formula(json.loads(Path(path).read_text("utf-8")), its_url, its_sha256))
