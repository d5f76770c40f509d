"""Prerequisites of the services on this Mac: files, ports, builds, confinement; and the programs composed of them."""
