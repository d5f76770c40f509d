"""The base of the errors that end a command with their message alone: the user can put right what is wrong."""

from __future__ import annotations

NOT_RUNNING = 3
"""Exit code of a command that found nothing running."""


class UserError(Exception):
    """Something is in a command's way; the message says what it is and what to do."""

    code = 1
    """Exit code of the command."""
