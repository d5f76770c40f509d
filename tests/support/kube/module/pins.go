//go:build tools

// Package kube names the programs that tests/support/kube/kube_binaries.py builds, so that `go mod tidy` keeps what they need.
package kube

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
)
