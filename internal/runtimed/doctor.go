package runtimed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"imp.dev/imp/internal/machine"
	"imp.dev/imp/internal/machine/rpc"
)

// Exit codes of doctor.
const (
	exitFindings = 1
	exitError    = 2
)

// errFindings says that something is left that is not as it should be. What, was printed.
var errFindings = errors.New("not everything is as it should be")

// ExitCode is what the program ends with for an error of its command.
func ExitCode(err error) int {
	var d *doctorError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errFindings):
		return exitFindings
	case errors.As(err, &d):
		return exitError
	default:
		return 1
	}
}

// doctorError is any other error of doctor: a script can tell it from findings.
type doctorError struct{ err error }

func (e *doctorError) Error() string { return e.err.Error() }
func (e *doctorError) Unwrap() error { return e.err }

// doctor is the command that asks the node's running runtime.
type doctor struct {
	socket, output string
	timeout        time.Duration
}

// client is what doctor uses of the runtime.
type client interface {
	machine.Keeper
	List(ctx context.Context) ([]machine.Status, error)
}

func newDoctor() *cobra.Command {
	var d doctor
	var repair bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Compare this node with the runtime's records, and repair; needs root and a running runtime",
		Long: "Asks the running runtime to compare what is on this node with its records, and prints what is not as it should be.\n" +
			"Exit code 0: nothing is left that is wrong; 1: something is, see the table; 2: it could not be found out.",
		Args: cobra.NoArgs,
		RunE: d.run(func(ctx context.Context, c client, out io.Writer, _ []string) error {
			return d.audit(ctx, c, out, repair)
		}),
	}
	f := cmd.PersistentFlags()
	f.StringVar(&d.socket, "socket", "/run/imp/runtime.sock", "the runtime's socket: runtime.sock in its --run-dir")
	f.StringVarP(&d.output, "output", "o", "", "json, or nothing for a table")
	f.DurationVar(&d.timeout, "timeout", 5*time.Minute, "time the runtime has to answer")
	cmd.Flags().BoolVar(&repair, "repair", false, "remove what is nobody's now, without waiting for its grace")
	cmd.AddCommand(&cobra.Command{
		Use: "trash", Short: "List the disks that can be given back", Args: cobra.NoArgs,
		RunE: d.run(func(ctx context.Context, c client, out io.Writer, _ []string) error { return d.trash(ctx, c, out) }),
	})
	var vm string
	restore := &cobra.Command{
		Use: "restore NAME", Short: "Give a disk of the trash to a VM that is stopped; the disk it has goes to the trash", Args: cobra.ExactArgs(1),
		RunE: d.run(func(ctx context.Context, c client, out io.Writer, args []string) error {
			if vm == "" {
				return errors.New("reading flags: --vm is missing: it takes the VM's UID (kubectl get impvm NAME -o jsonpath='{.metadata.uid}')")
			}
			if err := c.Restore(ctx, args[0], vm); err != nil {
				return err
			}
			fmt.Fprintf(out, "disk %s was given to VM %s\n", args[0], vm)
			return nil
		}),
	}
	restore.Flags().StringVar(&vm, "vm", "", "UID of the VM")
	cmd.AddCommand(restore)
	return cmd
}

// run wraps a command's work: it connects, and says of each error that it is one.
func (d *doctor) run(do func(context.Context, client, io.Writer, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := func() error {
			if d.output != "" && d.output != "json" {
				return fmt.Errorf("reading flags: --output is %q and must be json", d.output)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), d.timeout)
			defer cancel()
			if err := reach(ctx, d.socket); err != nil {
				return err
			}
			c, err := rpc.NewClient(d.socket)
			if err != nil {
				return err
			}
			defer c.Close()
			return do(ctx, c, cmd.OutOrStdout(), args)
		}()
		if err != nil && !errors.Is(err, errFindings) {
			return &doctorError{fmt.Errorf("doctor: %w", err)}
		}
		return err
	}
}

// reach tells why a runtime cannot be reached in words that say what to do: a client's own are about connections.
func reach(ctx context.Context, socket string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	switch {
	case err == nil:
		return conn.Close()
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no runtime serves at %s: start imp-runtime (on a cluster: kubectl -n imp-system get pods -l app.kubernetes.io/name=imp -o wide), or name its socket with --socket", socket)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("this user may not use %s: run it as root", socket)
	default:
		return fmt.Errorf("reaching runtime: %w", err)
	}
}

// finding is machine.Finding as it is printed.
type finding struct {
	Kind string `json:"kind"`
	// ID is the VM's UID, or the network's.
	ID       string    `json:"id,omitempty"`
	VM       string    `json:"vm,omitempty"` // namespace/name, of a VM that is known
	Name     string    `json:"name"`
	Since    time.Time `json:"since"`
	Repaired bool      `json:"repaired"`
	Problem  string    `json:"problem,omitempty"`
}

func (f finding) state() string {
	switch {
	case f.Repaired:
		return "repaired"
	case f.Problem != "":
		return f.Problem
	default:
		return "nobody's: removed after its grace, or now with --repair"
	}
}

func (d *doctor) audit(ctx context.Context, c client, out io.Writer, repair bool) error {
	found, err := c.Audit(ctx, repair)
	if err != nil {
		return err
	}
	names, err := namesOf(ctx, c)
	if err != nil {
		return err
	}
	list, left := make([]finding, 0, len(found)), 0
	for _, f := range found {
		list = append(list, finding{Kind: f.Kind, ID: f.ID, VM: names[f.ID], Name: f.Name, Since: f.Since, Repaired: f.Repaired, Problem: f.Problem})
		if !f.Repaired {
			left++
		}
	}
	if d.output == "json" {
		err = writeJSON(out, map[string]any{"findings": list})
	} else {
		err = printFindings(out, list, left)
	}
	if err == nil && left > 0 {
		return fmt.Errorf("%w: %d of %d findings are left", errFindings, left, len(list))
	}
	return err
}

func printFindings(out io.Writer, list []finding, left int) error {
	if len(list) == 0 {
		fmt.Fprintln(out, "Node and records agree.")
		return nil
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "KIND\tOF\tWHAT\tSINCE\tSTATE")
	for _, f := range list {
		of := f.ID
		if f.VM != "" {
			of = f.VM
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", f.Kind, dash(of), oneLine(f.Name), when(f.Since), oneLine(f.state()))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "%d findings, %d repaired, %d left\n", len(list), len(list)-left, left)
	return nil
}

// namesOf gives namespace/name of the VMs that are known, by UID.
func namesOf(ctx context.Context, c client) (map[string]string, error) {
	all, err := c.List(ctx)
	names := map[string]string{}
	for _, st := range all {
		if st.Name != "" {
			names[st.ID] = st.Namespace + "/" + st.Name
		}
	}
	return names, err
}

// trashed is machine.Discarded as it is printed.
type trashed struct {
	Name        string    `json:"name"`
	ID          string    `json:"id"`
	VM          string    `json:"vm,omitempty"`
	BaseDigest  string    `json:"baseDigest,omitempty"`
	GiB         int64     `json:"gib"`
	Bytes       int64     `json:"bytes"`
	DiscardedAt time.Time `json:"discardedAt"`
	ExpiresAt   time.Time `json:"expiresAt"`
	Why         string    `json:"why"`
}

func (d *doctor) trash(ctx context.Context, c client, out io.Writer) error {
	all, err := c.Trash(ctx)
	if err != nil {
		return err
	}
	list := make([]trashed, 0, len(all))
	for _, t := range all {
		one := trashed{Name: t.Name, ID: t.ID, BaseDigest: t.BaseDigest, GiB: t.GiB, Bytes: t.Bytes, DiscardedAt: t.DiscardedAt, ExpiresAt: t.ExpiresAt, Why: t.Why}
		if t.VM != "" {
			one.VM = t.VMNamespace + "/" + t.VM
		}
		list = append(list, one)
	}
	if d.output == "json" {
		return writeJSON(out, map[string]any{"disks": list})
	}
	if len(list) == 0 {
		fmt.Fprintln(out, "No disks are in the trash.")
		return nil
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tVM\tUSED\tBASE\tDISCARDED\tKEPT UNTIL\tWHY")
	for _, one := range list {
		fmt.Fprintf(t, "%s\t%s\t%d MiB of %d GiB\t%s\t%s\t%s\t%s\n", one.Name, dash(one.VM), (one.Bytes+1<<20-1)>>20, one.GiB, dash(short(one.BaseDigest)),
			when(one.DiscardedAt), when(one.ExpiresAt), oneLine(one.Why))
	}
	return t.Flush()
}

func writeJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func when(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// short is the beginning of a digest, as long as a human needs to tell it from others.
func short(digest string) string { return digest[:min(len(digest), len("sha256:")+12)] }

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// oneLine keeps text of others from breaking a table, or a terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}
