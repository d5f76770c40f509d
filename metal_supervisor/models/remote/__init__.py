"""Model files on servers: where a source leads, which hosts and addresses are allowed, and the download of one file."""
