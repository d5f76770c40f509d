"""The sidecar: watches the engines, tells the cluster and whoever asks over HTTP."""
