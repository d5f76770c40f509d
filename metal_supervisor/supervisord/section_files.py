"""Files with sections of programs, as supervisord reads them."""

from __future__ import annotations

import io
import re
from pathlib import Path

ALLOWED_SECTIONS = frozenset({"program", "group", "eventlistener", "fcgi-program"})


def refusal(path: Path) -> str | None:
    """Reason why supervisord would refuse an included file, from its own parser where possible; None if it would not.

    One such file blocks every reload, and keeps supervisord from starting at all.
    """
    from supervisor.options import ServerOptions, UnhosedConfigParser

    options = ServerOptions()
    options.here = str(path.parent)
    try:
        text = path.read_text("utf-8")
        parser = UnhosedConfigParser()
        parser.read_string(text, str(path))
        for name in parser.sections():
            if not re.fullmatch(r"[!-~]+", name):
                return f"[{name!r:.80}] has characters that supervisord cannot report"
            if name.partition(":")[0] not in ALLOWED_SECTIONS:
                return f"[{name}] belongs into supervisord.conf, not here"
        options.read_config(io.StringIO(f"{text}\n[supervisord]\nnodaemon=true\n"))
    except (OSError, UnicodeDecodeError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever its parser raises, supervisord would die of it
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return None
