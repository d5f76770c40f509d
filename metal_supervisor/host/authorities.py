"""The certificate authorities by which servers are verified: OpenSSL's default ones, else those that macOS keeps.

python.org's Python has none on a Mac until its user runs the script `Install Certificates`: no server of the internet
would be trusted.
"""

from __future__ import annotations

import ssl
from pathlib import Path

OF_THE_SYSTEM = Path("/etc/ssl/cert.pem")


def file_instead() -> str | None:
    """File of authorities to load instead of OpenSSL's default ones; None where those are there, or neither is."""
    default = ssl.get_default_verify_paths()
    try:
        known = bool(default.cafile) or (bool(default.capath) and any(Path(default.capath).iterdir()))
    except OSError:
        known = True  # what is closed to us is OpenSSL's to report
    return str(OF_THE_SYSTEM) if not known and OF_THE_SYSTEM.is_file() else None
