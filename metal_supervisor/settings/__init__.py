"""Settings of this Mac: declared once, loaded from file, environment and flags; and the form of log lines."""
