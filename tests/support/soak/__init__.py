"""Random faults on a running system, with invariants that are checked."""
