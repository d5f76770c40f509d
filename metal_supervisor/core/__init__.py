"""The pure core: standard library only, no clock, no files, no sockets, no environment."""
