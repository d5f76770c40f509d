"""The state directory: records, specs and the doorbell, the only thing that our processes share."""
