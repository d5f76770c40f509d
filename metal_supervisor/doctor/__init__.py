"""`metal-supervisor doctor`: everything that has to be right on this Mac and in its cluster, asked and judged."""
