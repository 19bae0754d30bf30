package fcfake

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// field of a request's body. A body with a field that is not known to the version, or without one that must be there, is refused.
type field struct {
	name     string
	required bool
	// since is the minor release of 1.x that knows the field first.
	since int
}

func must(name string) field               { return field{name: name, required: true} }
func may(name string) field                { return field{name: name} }
func since(minor int, name string) field   { return field{name: name, since: minor} }
func (f field) known(minor int) bool       { return minor >= f.since }
func named(name string) func(f field) bool { return func(f field) bool { return f.name == name } }

// schemas of the requests, by method and first element of the path, as in Firecracker's src/firecracker/swagger/firecracker.yaml and, where that
// is less strict than the program, its vmm_config.
func schemas() map[string][]field {
	return map[string][]field{
		"PUT machine-config": {must("vcpu_count"), must("mem_size_mib"), may("smt"), may("cpu_template"), may("track_dirty_pages"), may("huge_pages")},
		"PUT boot-source":    {must("kernel_image_path"), may("initrd_path"), may("boot_args")},
		"PUT drives": {must("drive_id"), must("is_root_device"), may("partuuid"), may("cache_type"), may("is_read_only"), may("path_on_host"), may("rate_limiter"),
			may("io_engine"), may("socket")},
		"PUT network-interfaces": {must("iface_id"), must("host_dev_name"), may("guest_mac"), since(16, "mtu"), may("rx_rate_limiter"), may("tx_rate_limiter")},
		"PUT vsock":              {must("guest_cid"), must("uds_path"), may("vsock_id")},
		"PUT balloon": {must("amount_mib"), must("deflate_on_oom"), may("stats_polling_interval_s"), may("free_page_reporting"),
			may("free_page_hinting")},
		"PUT entropy": {may("rate_limiter")},
		"PUT serial":  {may("serial_out_path"), since(16, "rate_limiter")},
		"PUT logger":  {may("log_path"), may("level"), may("show_level"), may("show_log_origin"), may("module")},
		"PUT metrics": {must("metrics_path")},
		"PUT actions": {must("action_type")},
		"PATCH vm":    {must("state")},
	}
}

var validID = regexp.MustCompile(`^[A-Za-z0-9_]+$`)

// refusal is an answer with a fault_message.
type refusal struct {
	status int
	words  string
}

func bad(format string, args ...any) *refusal {
	return &refusal{status: 400, words: fmt.Sprintf(format, args...)}
}

const serde = "An error occurred when deserializing the json body of a request: "

// parse holds a body against its schema.
func parse(method, path string, body []byte, minor int) (map[string]any, *refusal) {
	elements := strings.Split(strings.Trim(path, "/"), "/")
	fields, ok := schemas()[method+" "+elements[0]]
	if !ok {
		return nil, bad("Invalid request method and/or path: %s %s.", method, elements[0])
	}
	if len(body) == 0 {
		return nil, bad("Empty %s request.", method)
	}
	var object map[string]any
	if err := json.Unmarshal(body, &object); err != nil {
		return nil, bad(serde+"%v.", err)
	}
	for name := range object {
		if at := slices.IndexFunc(fields, named(name)); at < 0 || !fields[at].known(minor) {
			return nil, bad(serde+"unknown field `%s`, expected one of %s at line 1 column %d.", name, names(fields, minor), len(body))
		}
	}
	for _, f := range fields {
		if _, there := object[f.name]; f.required && !there {
			return nil, bad(serde+"missing field `%s` at line 1 column %d.", f.name, len(body))
		}
	}
	if id := map[string]string{"drives": "drive_id", "network-interfaces": "iface_id"}[elements[0]]; id != "" {
		switch {
		case len(elements) != 2:
			return nil, bad("The ID cannot be empty.")
		case !validID.MatchString(elements[1]):
			return nil, bad("API Resource IDs can only contain alphanumeric characters and underscores.")
		case object[id] != elements[1]:
			return nil, bad("The id from the path does not match the id from the body!")
		}
	}
	return object, nil
}

func names(fields []field, minor int) string {
	var known []string
	for _, f := range fields {
		if f.known(minor) {
			known = append(known, "`"+f.name+"`")
		}
	}
	return strings.Join(known, ", ")
}
