package firecracker

// The bodies of the API's requests, as far as the driver uses them (Firecracker's own src/firecracker/swagger/firecracker.yaml). A body with
// a field that the running release does not know is refused, so every field that came after minVersion is left out where it is not known.

type machineConfig struct {
	VCPUCount       int   `json:"vcpu_count"`
	MemSizeMiB      int64 `json:"mem_size_mib"`
	SMT             bool  `json:"smt"`
	TrackDirtyPages bool  `json:"track_dirty_pages"`
}

type bootSource struct {
	KernelImagePath string `json:"kernel_image_path"`
	InitrdPath      string `json:"initrd_path,omitempty"`
	BootArgs        string `json:"boot_args"`
}

type drive struct {
	DriveID      string `json:"drive_id"`
	PathOnHost   string `json:"path_on_host"`
	IsRootDevice bool   `json:"is_root_device"`
	IsReadOnly   bool   `json:"is_read_only"`
	CacheType    string `json:"cache_type"`
	IOEngine     string `json:"io_engine"`
}

type networkInterface struct {
	IfaceID     string `json:"iface_id"`
	HostDevName string `json:"host_dev_name"`
	GuestMAC    string `json:"guest_mac"`
}

type vsockDevice struct {
	GuestCID int    `json:"guest_cid"`
	UDSPath  string `json:"uds_path"`
}

type balloon struct {
	AmountMiB             int64 `json:"amount_mib"`
	DeflateOnOOM          bool  `json:"deflate_on_oom"`
	StatsPollingIntervalS int   `json:"stats_polling_interval_s"`
}

type entropyDevice struct{}

// Actions and states of the API.
const (
	actionStart      = "InstanceStart"
	actionFlush      = "FlushMetrics"
	actionCtrlAltDel = "SendCtrlAltDel"

	statePaused  = "Paused"
	stateResumed = "Resumed"
	stateRunning = "Running"
)

type action struct {
	ActionType string `json:"action_type"`
}

type vmState struct {
	State string `json:"state"`
}

// instanceInfo answers GET /.
type instanceInfo struct {
	AppName    string `json:"app_name"`
	ID         string `json:"id"`
	State      string `json:"state"`
	VMMVersion string `json:"vmm_version"`
}

type versionInfo struct {
	FirecrackerVersion string `json:"firecracker_version"`
}

// call is one request that changes something.
type call struct {
	Method string
	Path   string
	Body   any
}
