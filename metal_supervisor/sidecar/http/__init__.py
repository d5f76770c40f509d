"""Health, readiness, metrics, status and the page, served over HTTP from memory."""
