"""Placement: which Mac serves which replica, by claims on Leases."""
