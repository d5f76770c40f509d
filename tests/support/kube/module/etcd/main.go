// Command etcd is etcd's own server, as a program of this module, so that go.sum pins what it is built from.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
