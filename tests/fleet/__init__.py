"""Many Macs of one real API server, and what they cost it."""
