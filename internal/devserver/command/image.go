package command

import (
	"fmt"
	"strings"

	"imp.dev/imp/examples"
	"imp.dev/imp/internal/devserver/controlplane"
	"imp.dev/imp/internal/devserver/demo"
	"imp.dev/imp/internal/devserver/imagefile"

	"github.com/spf13/cobra"
)

func newImage() *cobra.Command {
	cmd := &cobra.Command{Use: "image", Short: "Make images and push them"}
	cmd.AddCommand(newImagePush(), newImageDemo())
	return cmd
}

func newImageDemo() *cobra.Command {
	return &cobra.Command{
		Use:   "demo [REGISTRY]",
		Short: "Make the image that examples/ use, out of Debian's busybox-static, and push it",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			registry := examples.Registry
			if len(args) > 0 {
				registry = args[0]
			}
			cache, err := controlplane.CacheDir()
			if err != nil {
				return err
			}
			img, err := demo.Image(cmd.Context(), cache)
			if err != nil {
				return err
			}
			reference, err := imagefile.Push(cmd.Context(), img, registry+"/"+demo.ImageName, nil)
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), reference)
			return nil
		},
	}
}

func newImagePush() *cobra.Command {
	var config imagefile.Config
	cmd := &cobra.Command{
		Use:   "push TARBALL|DIR|OCI-LAYOUT NAME",
		Short: "Push an image to a registry, the development server's or any",
		Long: "Push what lies on the disk: a tarball of `docker save`, an OCI layout, or a root file system as a directory or tarball\n" +
			"(optionally gzipped), which becomes an image of one layer. NAME has the registry in it: 127.0.0.1:5050/web:1.\n" +
			"Credentials come from the docker config file.",
		Example: "  imp-dev image push rootfs/ 127.0.0.1:5050/web:1 --entrypoint /bin/httpd --cmd -f",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if first, _, ok := strings.Cut(args[1], "/"); !ok || !strings.ContainsAny(first, ".:") && first != "localhost" {
				return fmt.Errorf("reading NAME: %s names no registry; imp-dev's own is %s/%s", args[1], examples.Registry, args[1])
			}
			img, err := imagefile.Load(args[0], config)
			if err != nil {
				return err
			}
			reference, err := imagefile.Push(cmd.Context(), img, args[1], nil)
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), reference)
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&config.Entrypoint, "entrypoint", nil, "one word of the entrypoint; repeat it for more (drops the image's cmd)")
	flags.StringArrayVar(&config.Cmd, "cmd", nil, "one word of the cmd; repeat it for more")
	flags.StringArrayVar(&config.Env, "env", nil, "NAME=value; repeat it for more")
	flags.StringVar(&config.User, "user", "", "user or uid, optionally :group")
	flags.StringVar(&config.WorkingDir, "workdir", "", "working directory")
	flags.StringVar(&config.StopSignal, "stop-signal", "", "signal that asks the workload to end")
	flags.StringArrayVar(&config.Volumes, "volume", nil, "path that is a file system of its own; repeat it for more")
	return cmd
}
