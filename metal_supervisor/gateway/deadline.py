"""A time limit for awaiting that never loses a cancellation.

`asyncio.wait_for` did before Python 3.12, if what it waited for was done in the same turn of the loop: a request whose
client had left then went on for ever.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ("timeout",)
