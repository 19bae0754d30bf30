package command

import (
	"fmt"
	"time"

	"imp.dev/imp/internal/devserver"
	"imp.dev/imp/internal/devserver/bench"
	"imp.dev/imp/internal/devserver/chaos"

	"github.com/spf13/cobra"
)

func newChaos() *cobra.Command {
	o := chaos.Options{}
	var printOnly bool
	var kinds []string
	cmd := &cobra.Command{
		Use:   "chaos",
		Short: "Disturb everything by a schedule that one number decides, and say what did not hold",
		Long: "Start a server of fake machines, kill, stop, partition and restart everything in it by a schedule that is a function of --seed,\n" +
			"check what must always hold against processes and objects, and print a verdict. The exit code is 0 if all held. See docs/chaos.md.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Kinds, err = chaos.ParseKinds(kinds); err != nil {
				return err
			}
			if printOnly {
				fmt.Fprint(cmd.OutOrStdout(), chaos.Make(chaos.ShapeOf(o)))
				return nil
			}
			if err := equip(&o.Server, cmd.ErrOrStderr()); err != nil {
				return err
			}
			o.Out = cmd.OutOrStdout()
			_, err = chaos.Run(cmd.Context(), o)
			return err
		},
	}
	flags := cmd.Flags()
	o.Server = devserver.Options{Accel: "tcg"}
	flags.Uint64Var(&o.Seed, "seed", 1, "decides the whole schedule")
	flags.DurationVar(&o.Duration, "duration", 5*time.Minute, "how long faults go on")
	flags.IntVar(&o.VMs, "vms", 200, "VMs at a time")
	flags.StringSliceVar(&kinds, "kinds", nil, "kinds of VMs, of those in docs/chaos.md (default: all)")
	flags.IntVar(&o.Server.Nodes, "nodes", 3, "how many nodes")
	flags.StringVar(&o.Server.VMM, "vmm", "fake", "VM monitor: fake, or qemu for real guests and a gentler schedule")
	flags.StringVar(&o.Server.BinDir, "bin-dir", "", "folder of Imp's programs (default: where imp-dev lies)")
	flags.DurationVar(&o.Bound, "bound", chaos.DefaultBound, "within which every VM must be as wanted once faults have stopped")
	flags.BoolVar(&printOnly, "print", false, "print the schedule and do nothing")
	flags.BoolVar(&o.KeepLogs, "keep-logs", false, "leave the programs' logs in place although all held")
	return cmd
}

func newBenchSupervision() *cobra.Command {
	opts := devserver.Options{Accel: "tcg"}
	var kills int
	cmd := &cobra.Command{
		Use:   "supervision",
		Short: "Print how soon is told what became of one of 200 fake VMs, how soon 200 are adopted, and what they write at rest",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := equip(&opts, cmd.ErrOrStderr()); err != nil {
				return err
			}
			return bench.Supervision(cmd.Context(), opts, kills, cmd.OutOrStdout())
		},
	}
	cmd.Flags().IntVar(&kills, "kills", 100, "VMMs killed for each distribution")
	cmd.Flags().StringVar(&opts.BinDir, "bin-dir", "", "folder of Imp's programs (default: where imp-dev lies)")
	return cmd
}
