"""The Kubernetes API: credentials, requests, watches, and the objects that are written."""
