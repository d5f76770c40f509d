"""Programs that tests need, found on this machine or installed once."""
