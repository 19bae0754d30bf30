// Package runtimev1 is the wire form of machine.Service: what imp-runtime offers on its UNIX socket to the agent of its node.
//
// Everything but runtime.proto is generated (make generate). A field is added with a new number and never changes its meaning; agent N works with
// runtimes N−2…N+1.
package runtimev1
