"""Confinement of engine processes by the operating system: a policy made of data, and its enforcement.

`policy` and `seatbelt` are pure: from an engine's command line to the paths and ports it may use. `enforce` is what the
launcher runs right before `execve`; it imports the standard library only. `probe` tries both on this machine.
"""
