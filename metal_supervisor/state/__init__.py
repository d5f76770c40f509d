"""The state directory: records, specs and the doorbell, all that the processes share."""
