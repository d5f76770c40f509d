"""Model files: sources, the store, downloads, and the headers that tell what a model needs."""
