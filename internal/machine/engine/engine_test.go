package engine_test

import (
	"os"
	"testing"

	"imp.dev/imp/internal/machine/machinetest"
	"imp.dev/imp/internal/process"
	vmmfake "imp.dev/imp/internal/vmm/fake"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case process.ChildCommand:
			process.ChildMain()
		case vmmfake.Command:
			vmmfake.Main()
		}
	}
	os.Exit(m.Run())
}

func TestService(t *testing.T) {
	machinetest.Run(t, func(t *testing.T) *machinetest.Harness { return machinetest.NewEngine(t, nil) })
}

func TestTheRuntimeMayDieAnywhere(t *testing.T) {
	machinetest.RunCrashes(t, func(t *testing.T) *machinetest.Harness { return machinetest.NewEngine(t, nil) })
}
