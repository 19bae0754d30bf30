package qemu

import (
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	tscSamples = 5
	tscWindow  = 20 * time.Millisecond
)

// measureTSC gives the host's TSC rate in kHz, 0 on an architecture without one. Under TCG the guest's counter is the host's, so a
// wrong rate is a clock that runs fast or slow without any error. The first sample is thrown away (cold caches); the
// median of the rest is immune to a sample that was interrupted between its two reads.
func measureTSC() (int64, error) {
	if runtime.GOARCH != "amd64" {
		return 0, nil
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	rates := make([]int64, 0, tscSamples)
	for i := range tscSamples + 1 {
		rate, err := sampleTSC()
		if err != nil {
			return 0, err
		}
		if i > 0 {
			rates = append(rates, rate)
		}
	}
	slices.Sort(rates)
	rate := rates[len(rates)/2]
	const lowest, highest = 100_000, 20_000_000 // kHz; beyond is no processor
	if rate < lowest || rate > highest {
		return 0, fmt.Errorf("measuring TSC: implausible rate of %d kHz", rate)
	}
	return rate, nil
}

func sampleTSC() (int64, error) {
	t0, c0, err := tscMoment()
	if err != nil {
		return 0, err
	}
	pause := unix.NsecToTimespec(int64(tscWindow))
	_ = unix.Nanosleep(&pause, nil) // shorter after a signal: the interval is measured, not assumed
	t1, c1, err := tscMoment()
	if err != nil {
		return 0, err
	}
	return int64(float64(c1-c0) / float64(t1-t0) * 1e6), nil
}

// tscMoment reads both clocks, the counter around the other one, in the tightest of a few tries.
func tscMoment() (nanos int64, counter uint64, err error) {
	best := ^uint64(0)
	for range 10 {
		var ts unix.Timespec
		before := readTSC()
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
			return 0, 0, fmt.Errorf("reading clock: %w", err)
		}
		if width := readTSC() - before; width < best {
			best, nanos, counter = width, ts.Nano(), before+width/2
		}
	}
	return nanos, counter, nil
}
