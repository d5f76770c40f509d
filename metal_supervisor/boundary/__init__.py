"""Kept for systems that an earlier release started: see `supervisord.py`."""
