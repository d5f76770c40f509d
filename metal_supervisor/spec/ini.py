"""What may stand in supervisord's configuration, which expands `%` and ends a value at `;`."""

from __future__ import annotations

import re

SAFE_HOME = re.compile(r"/[A-Za-z0-9._/+-]*")
"""A state directory's path that needs no link beside it."""
