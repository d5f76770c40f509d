"""One module per outside system: thin, typed errors, a timeout on every call."""
