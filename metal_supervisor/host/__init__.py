"""This Mac: processes, addresses, chip, memory counters, sleep, power and launchd."""
