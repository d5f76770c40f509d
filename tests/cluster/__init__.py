"""What only a real kube-apiserver can show. `make test-cluster` runs these, and the contract against it."""
