"""The sidecar: watches the engines, and reports on them to the cluster and over HTTP."""
