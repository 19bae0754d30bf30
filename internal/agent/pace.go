package agent

import "time"

const (
	// settle is how long a change that nobody waits for is held back, so that what follows it goes into the same write.
	settle = 2 * time.Second
	// burst significant changes within burstWindow are written at once; further ones settle. A guest that reboots in a
	// loop must not become a loop of writes.
	burst       = 5
	burstWindow = 10 * time.Second
)

// pace decides when a changed status of one VM is written: a change that somebody waits for at once, any other after settle,
// counted from the first one that is not written yet. The zero value is ready.
type pace struct {
	dirtySince time.Time
	recent     []time.Time // latest writes, at most burst
}

// due gives how long a write of the present change is to wait; 0 is now.
func (p *pace) due(now time.Time, significant bool) time.Duration {
	if p.dirtySince.IsZero() {
		p.dirtySince = now
	}
	if significant && !p.crowded(now) {
		return 0
	}
	return max(settle-now.Sub(p.dirtySince), 0)
}

// clean says that what is on the object is what should be.
func (p *pace) clean() { p.dirtySince = time.Time{} }

// written says that a write was made.
func (p *pace) written(now time.Time) {
	p.clean()
	p.recent = append(p.recent, now)
	if len(p.recent) > burst {
		p.recent = p.recent[len(p.recent)-burst:]
	}
}

func (p *pace) crowded(now time.Time) bool {
	return len(p.recent) == burst && now.Sub(p.recent[0]) < burstWindow
}
