package linux

import (
	"crypto/sha256"
	"encoding/hex"
	"net"
	"strings"
)

// names of what is made: whose it is can be read off each.
type names struct{ instance string }

const hexDigits = "0123456789abcdef"

// namespace gives the name of a network's namespace: of its UID the first eight digits, or of a hash where the ID is no UID or
// another network here has that name.
func (n names) namespace(id string, taken func(string) bool) string {
	if len(id) > 8 && id[8] == '-' && strings.Trim(id[:8], hexDigits) == "" {
		if name := n.namespacePrefix() + id[:8]; !taken(name) {
			return name
		}
	}
	for salt := id; ; salt += "'" {
		if name := n.namespacePrefix() + digest("namespace/"+salt, 8); !taken(name) {
			return name
		}
	}
}

func (n names) namespacePrefix() string { return "imp-" + n.instance + "-" }

// prefix of every device of ours: with ten digits after it there are the fifteen characters that the kernel allows.
func (n names) prefix() string { return "i" + n.instance[:4] }

func (n names) device(kind, id string) string {
	return n.prefix() + digest(n.instance+"/"+kind+"/"+id, 10)
}

func (n names) bridge(id string) string  { return n.device("bridge", id) }
func (n names) overlay(id string) string { return n.device("overlay", id) }

// uplink is the namespace's end of the veth, hostEnd the host's.
func (n names) uplink(id string) string  { return n.device("uplink", id) }
func (n names) hostEnd(id string) string { return n.device("host", id) }

func (n names) tap(vm, name string) string { return n.device("tap", vm+"/"+name) }

// alias tells a human and the sweep whose a device is; the kernel takes 255 bytes.
func (n names) alias(of string) string { return clip("imp "+n.instance+" "+of, 255) }

// hardwareAddress is a fixed one for a device, so that nobody else (udev) thinks it has to choose one.
func hardwareAddress(device string) net.HardwareAddr {
	sum := sha256.Sum256([]byte("device/" + device))
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&0xfc | 0x02
	return mac
}

func digest(of string, digits int) string {
	sum := sha256.Sum256([]byte(of))
	return hex.EncodeToString(sum[:])[:digits]
}

func clip(s string, n int) string { return s[:min(n, len(s))] }
