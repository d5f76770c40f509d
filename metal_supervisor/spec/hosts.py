"""Hosts in addresses."""

from __future__ import annotations


def in_url(host: str) -> str:
    """A host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
