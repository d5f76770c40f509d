"""`metal-supervisor doctor`: checks of everything that has to be right on this Mac and in its cluster."""
