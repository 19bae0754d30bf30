package demo

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"imp.dev/imp/api/v1alpha1"

	"golang.org/x/term"
	"k8s.io/apimachinery/pkg/api/meta"
)

// board shows the VMs while one waits. On a terminal it is redrawn in place; elsewhere each change is one line more.
type board struct {
	out      io.Writer
	terminal bool
	began    time.Time
	drawn    int // lines on the terminal that are ours
	last     map[string]string
}

const gone = "is gone"

func newBoard(out io.Writer, began time.Time) *board {
	file, ok := out.(*os.File)
	return &board{out: out, terminal: ok && term.IsTerminal(int(file.Fd())), began: began, last: map[string]string{}}
}

func (b *board) show(vms []v1alpha1.ImpVM) {
	slices.SortFunc(vms, func(x, y v1alpha1.ImpVM) int { return strings.Compare(x.Name, y.Name) })
	elapsed := fmt.Sprintf("%6.1fs", time.Since(b.began).Seconds())
	if !b.terminal {
		for name, row := range b.last {
			if row != gone && !slices.ContainsFunc(vms, func(vm v1alpha1.ImpVM) bool { return vm.Name == name }) {
				b.last[name] = gone
				fmt.Fprintf(b.out, "%s  %s %s\n", elapsed, name, gone)
			}
		}
		for i := range vms {
			row := strings.Join(cells(&vms[i]), " ")
			if b.last[vms[i].Name] != row {
				b.last[vms[i].Name] = row
				fmt.Fprintf(b.out, "%s  %s\n", elapsed, row)
			}
		}
		return
	}
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "NAME\tPHASE\tREADY\tNODE\tREASON\tEXIT\tMESSAGE")
	for i := range vms {
		fmt.Fprintln(table, strings.Join(cells(&vms[i]), "\t"))
	}
	_ = table.Flush() // a strings.Builder cannot fail
	lines := strings.Split(strings.TrimRight(text.String(), "\n"), "\n")
	if b.drawn > 0 {
		fmt.Fprintf(b.out, "\x1b[%dA", b.drawn) // up to the first of our lines
	}
	// \x1b[J clears what is below: a VM that is gone leaves no line.
	fmt.Fprint(b.out, "\x1b[J")
	for _, line := range append(lines, elapsed) {
		fmt.Fprintln(b.out, shorten(line, b.width()))
	}
	b.drawn = len(lines) + 1
}

// width keeps each line on one line of the terminal, or going up again would miss the first.
func (b *board) width() int {
	if file, ok := b.out.(*os.File); ok {
		if width, _, err := term.GetSize(int(file.Fd())); err == nil && width > 20 {
			return width - 1
		}
	}
	return 79
}

func cells(vm *v1alpha1.ImpVM) []string {
	ready, reason, message := "-", "-", ""
	if c := meta.FindStatusCondition(vm.Status.Conditions, v1alpha1.ConditionReady); c != nil {
		ready, reason, message = string(c.Status), c.Reason, c.Message
	}
	exit := "-"
	if vm.Status.ExitCode != nil {
		exit = strconv.Itoa(int(*vm.Status.ExitCode))
	}
	return []string{vm.Name, orDash(string(vm.Status.Phase)), ready, orDash(vm.Status.NodeName), reason, exit, shorten(message, 60)}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func shorten(s string, limit int) string {
	s = strings.ReplaceAll(s, "\n", " ")
	if runes := []rune(s); len(runes) > limit {
		return string(runes[:limit-1]) + "…"
	}
	return s
}

// timings prints where the time of each VM's start went.
func timings(out io.Writer, vms []v1alpha1.ImpVM) {
	table := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "NAME\tPULL\tDISK\tNETWORK\tVMM\tKERNEL\tGUEST READY\tWORKLOAD\tSUM\t")
	for i := range vms {
		t := vms[i].Status.Timings
		if t == nil {
			continue
		}
		stages := []int64{t.PullMillis, t.DiskMillis, t.NetworkMillis, t.VMMMillis, t.KernelMillis, t.GuestMillis, t.WorkloadMillis}
		sum := int64(0)
		fmt.Fprint(table, vms[i].Name, "\t")
		for _, millis := range stages {
			sum += millis
			fmt.Fprintf(table, "%d ms\t", millis)
		}
		fmt.Fprintf(table, "%d ms\t\n", sum)
	}
	_ = table.Flush()
}
