"""Memory: budget, estimates, ledger, eviction and pressure. Decisions are pure."""
