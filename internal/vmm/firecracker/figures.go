package firecracker

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"imp.dev/imp/internal/console"
	"imp.dev/imp/internal/vmm"
)

// figurePeriod is between two readings of a machine's figures.
const figurePeriod = 10 * time.Second

// figures sums up what each machine's Firecracker counted since this process took it up. Firecracker itself tells only what was added since
// it told last.
type figures struct {
	mu   sync.Mutex
	runs map[string]*tally // by Config.Cgroup: one run of a VM at a time
}

type tally struct {
	vmm.Figures
	offset int64
}

func newFigures() *figures { return &figures{runs: map[string]*tally{}} }

// line is the part of one line of Firecracker's metrics that is of use (docs/metrics.md of its own). The devices' are the sums over all of
// a kind.
type line struct {
	VCPU struct {
		IOIn      uint64 `json:"exit_io_in"`
		IOOut     uint64 `json:"exit_io_out"`
		MMIORead  uint64 `json:"exit_mmio_read"`
		MMIOWrite uint64 `json:"exit_mmio_write"`
		Failures  uint64 `json:"failures"`
	} `json:"vcpu"`
	Block struct {
		Read      uint64 `json:"read_bytes"`
		Written   uint64 `json:"write_bytes"`
		Throttled uint64 `json:"rate_limiter_throttled_events"`
		Engine    uint64 `json:"io_engine_throttled_events"`
	} `json:"block"`
	Net struct {
		Received   uint64 `json:"rx_bytes_count"`
		Sent       uint64 `json:"tx_bytes_count"`
		ThrottleRx uint64 `json:"rx_rate_limiter_throttled"`
		ThrottleTx uint64 `json:"tx_rate_limiter_throttled"`
	} `json:"net"`
}

func (t *tally) add(l line) {
	for kind, n := range map[string]uint64{"io_in": l.VCPU.IOIn, "io_out": l.VCPU.IOOut, "mmio_read": l.VCPU.MMIORead, "mmio_write": l.VCPU.MMIOWrite, "failure": l.VCPU.Failures} {
		t.Exits[kind] += n
	}
	t.BlockRead += l.Block.Read
	t.BlockWritten += l.Block.Written
	t.NetReceived += l.Net.Received
	t.NetSent += l.Net.Sent
	for kind, n := range map[string]uint64{"block": l.Block.Throttled, "block_engine": l.Block.Engine, "net_rx": l.Net.ThrottleRx, "net_tx": l.Net.ThrottleTx} {
		t.Throttles[kind] += n
	}
}

// read takes in the lines that were written since the last reading; the last one may not be whole yet.
func (t *tally) read(path string) {
	for {
		chunk, err := console.Read(path, t.offset, 256<<10)
		if err != nil {
			return
		}
		end := bytes.LastIndexByte(chunk.Data, '\n')
		if end < 0 {
			return
		}
		for _, text := range bytes.Split(chunk.Data[:end], []byte("\n")) {
			var l line
			if json.Unmarshal(text, &l) == nil { // not whole where the file's middle was given back
				t.add(l)
			}
		}
		t.offset = chunk.Offset + int64(end) + 1
	}
}

// begin starts the sums of a run with what is written from here on.
func (f *figures) begin(i *instance) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.runs[i.config.Cgroup] = &tally{offset: sizeOf(i.home.metricsPath()),
		Figures: vmm.Figures{VMID: i.config.VMID, Exits: map[string]uint64{}, Throttles: map[string]uint64{}}}
}

func (f *figures) take(i *instance) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t := f.runs[i.config.Cgroup]; t != nil {
		t.read(i.home.metricsPath())
	}
}

func (f *figures) forget(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.runs, name)
}

// Figures implements vmm.Metered.
func (d *Driver) Figures() []vmm.Figures {
	d.figures.mu.Lock()
	defer d.figures.mu.Unlock()
	out := make([]vmm.Figures, 0, len(d.figures.runs))
	for _, t := range d.figures.runs {
		out = append(out, t.Clone())
	}
	slices.SortFunc(out, func(a, b vmm.Figures) int { return strings.Compare(a.VMID, b.VMID) })
	return out
}

// meter reads the machine's figures until it has ended.
func (i *instance) meter(ctx context.Context) {
	i.driver.figures.begin(i)
	ticker := i.driver.options.Clock.NewTicker(i.driver.options.FigurePeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-i.ProcessDone():
			i.driver.figures.take(i) // it wrote a last line
			return
		case <-ticker.C():
		}
		// A machine that is paused, or busy with a request that takes long, is asked again the next time.
		if err := i.api.act(ctx, actionFlush); err != nil {
			i.log.Debug("Figures of Firecracker not written", "err", err)
			continue
		}
		i.driver.figures.take(i)
	}
}
