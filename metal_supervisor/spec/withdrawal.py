"""Token of one request by the controller that the sidecar withdraw an endpoint.

The controller writes it into the service's record, the sidecar hands it back once the endpoint is out. On file it is
the Unix time of the request, as text: the sidecar reads off it how long a request has been waiting.
"""

from __future__ import annotations

from typing import NewType

WithdrawalToken = NewType("WithdrawalToken", str)
NO_WITHDRAWAL = WithdrawalToken("")


def withdrawal_token(now: float) -> WithdrawalToken:
    """Make the token of a request made at a Unix time."""
    return WithdrawalToken(f"{now:.6f}")


def requested_at(token: WithdrawalToken) -> float:
    """Unix time of the request. 0 for none, and for text that is no time: it counts as long overdue."""
    try:
        return float(token)
    except ValueError:
        return 0.0
