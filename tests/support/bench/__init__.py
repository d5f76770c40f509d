"""Latencies and costs, as `make bench` measures them."""
