"""The acceptance checks that only a Mac can make."""
