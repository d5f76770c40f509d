"""What a Kubernetes API promises, as far as we rely on it: the same tests for a real server and for our own."""
