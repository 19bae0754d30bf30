package command

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"imp.dev/imp/api/v1alpha1"
	"imp.dev/imp/internal/devserver"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
)

func newConsole() *cobra.Command {
	var dir string
	var follow bool
	cmd := &cobra.Command{
		Use:   "console NAMESPACE/NAME",
		Short: "Print the serial console of a VM",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dir == "" {
				dir = serverDir(os.Getenv("KUBECONFIG"))
			}
			namespace, name, ok := strings.Cut(args[0], "/")
			if !ok {
				namespace, name = "default", args[0]
			}
			places, err := devserver.PlacesOf(dir)
			if err != nil {
				return err
			}
			cfg, err := clientcmd.BuildConfigFromFlags("", places.Kubeconfig())
			if err != nil {
				return fmt.Errorf("reading the kubeconfig in %s (give the --dir of imp-dev up, or the KUBECONFIG that it prints): %w", places.Dir, err)
			}
			c, err := devserver.NewClient(cfg)
			if err != nil {
				return err
			}
			vm := &v1alpha1.ImpVM{}
			if err := c.Get(cmd.Context(), types.NamespacedName{Namespace: namespace, Name: name}, vm); err != nil {
				return fmt.Errorf("looking for the VM: %w", err)
			}
			if vm.Status.NodeName == "" {
				return fmt.Errorf("%s/%s is on no node yet, so it has no console", namespace, name)
			}
			return devserver.CopyConsole(cmd.Context(), places.RuntimeSocket(vm.Status.NodeName), string(vm.UID), follow, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "the --dir of imp-dev up (default: where KUBECONFIG lies, else "+DefaultDir+")")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on as the console grows, until Ctrl-C")
	return cmd
}

// serverDir is the server's folder: the one of the kubeconfig in use if a server wrote it.
func serverDir(kubeconfig string) string {
	if filepath.Base(kubeconfig) == "kubeconfig" && filepath.IsAbs(kubeconfig) {
		return filepath.Dir(kubeconfig)
	}
	return DefaultDir
}
