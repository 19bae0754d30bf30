package runtimed

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/network"
)

// failures make a share of steps fail, the same ones for the same seed and order of steps.
type failures struct {
	rate float64

	mu     sync.Mutex
	random *rand.Rand
}

// newFailures reads RATE[,SEED]; "" is a rate of 0.
func newFailures(text string) (*failures, error) {
	if text == "" {
		return &failures{}, nil
	}
	first, second, seeded := strings.Cut(text, ",")
	rate, err := strconv.ParseFloat(first, 64)
	seed := uint64(1)
	if err == nil && seeded {
		seed, err = strconv.ParseUint(second, 10, 64)
	}
	if err != nil || !(rate >= 0 && rate <= 1) {
		return nil, fmt.Errorf("reading flags: --network-failures is %q and must be RATE or RATE,SEED with a rate of 0 to 1, like 0.1,7", text)
	}
	return &failures{rate: rate, random: rand.New(rand.NewPCG(seed, seed))}, nil
}

// point is an error if the step is one of those to fail.
func (f *failures) point(step string) error {
	if f.rate == 0 {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.random.Float64() >= f.rate {
		return nil
	}
	return fmt.Errorf("step %q was made to fail (--network-failures)", step)
}

// failing is a network whose orders fail now and then, without having done anything.
type failing struct {
	network.Network
	failures *failures
}

func (n failing) point(stage string) error {
	return fault.New(fault.NetworkSetupFailed, stage, n.failures.point(stage))
}

// Set implements network.Network.
func (n failing) Set(ctx context.Context, spec network.Spec) error {
	if err := n.point("setting network"); err != nil {
		return err
	}
	return n.Network.Set(ctx, spec)
}

// Forget implements network.Network.
func (n failing) Forget(ctx context.Context, id string) error {
	if err := n.point("forgetting network"); err != nil {
		return err
	}
	return n.Network.Forget(ctx, id)
}

// Attach implements network.Network.
func (n failing) Attach(ctx context.Context, vmID string, interfaces []network.Interface) ([]network.Attachment, error) {
	if err := n.point("attaching network"); err != nil {
		return nil, err
	}
	return n.Network.Attach(ctx, vmID, interfaces)
}

// Detach implements network.Network.
func (n failing) Detach(ctx context.Context, vmID string) error {
	if err := n.point("detaching network"); err != nil {
		return err
	}
	return n.Network.Detach(ctx, vmID)
}
