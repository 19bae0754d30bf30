// Package layout says where things lie in the initramfs: what its builder writes and the guest's init reads. It is apart from
// the builder so that the init does not carry the builder's code.
package layout

// Paths in the archive, without the leading slash.
const (
	// Init is the program the kernel starts.
	Init = "init"
	// Modules holds kernel modules, unpacked, named NN-name.ko in the order of loading.
	Modules = "lib/modules"
	// Base, Private and Root are mount points: the image's disk, the VM's own disk, and the overlay of both.
	Base    = "m/base"
	Private = "m/private"
	Root    = "m/root"
)
