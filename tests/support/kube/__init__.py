"""A real kube-apiserver with etcd, built by Go once."""
