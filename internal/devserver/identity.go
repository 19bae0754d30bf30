package devserver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"imp.dev/imp/internal/devserver/controlplane"

	corev1 "k8s.io/api/core/v1"
)

// identity is who one program is to the API server, and to this machine.
type identity struct {
	program string // names its folder of credentials
	account string
	node    *corev1.Node // what the token is bound to; nil for none
	uid     int
}

func operatorIdentity() identity {
	return identity{program: operatorProgram, account: controlplane.OperatorAccount, uid: operatorUID}
}

func agentIdentity(node *corev1.Node) identity {
	return identity{program: agentProgram + "-" + node.Name, account: controlplane.AgentAccount, node: node, uid: agentUID}
}

// giveIdentity writes the program's kubeconfig and a fresh token, readable by it alone.
func (s *Server) giveIdentity(ctx context.Context, who identity) error {
	dir := s.Places.credentials(who.program)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("making the credentials of %s: %w", who.program, err)
	}
	if err := s.writeToken(ctx, who); err != nil {
		return err
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	server := s.ControlPlane.Anonymous()
	if s.opts.Relays {
		r, err := s.relayOf(who.program, server.Host)
		if err != nil {
			return err
		}
		server.Host = "https://" + r.Address()
	}
	if err := controlplane.WriteKubeconfig(kubeconfig, server, tokenFile(dir)); err != nil {
		return err
	}
	for _, path := range []string{kubeconfig, dir} {
		if err := os.Chown(path, who.uid, who.uid); err != nil {
			return fmt.Errorf("giving the credentials of %s away: %w", who.program, err)
		}
	}
	return nil
}

func tokenFile(dir string) string { return filepath.Join(dir, "token") }

// writeToken replaces the token by rename, because the program may read it at any moment.
func (s *Server) writeToken(ctx context.Context, who identity) error {
	token, err := s.ControlPlane.Token(ctx, who.account, who.node)
	if err != nil {
		return err
	}
	final := tokenFile(s.Places.credentials(who.program))
	if err := os.WriteFile(final+".new", []byte(token), 0o600); err != nil {
		return fmt.Errorf("writing the token of %s: %w", who.program, err)
	}
	if err := os.Chown(final+".new", who.uid, who.uid); err != nil {
		return fmt.Errorf("writing the token of %s: %w", who.program, err)
	}
	return os.Rename(final+".new", final)
}

// keepIdentities renews the tokens at half of their life until ctx ends. One that could not be renewed is good for the
// other half, in which it is tried again many times.
func (s *Server) keepIdentities(ctx context.Context, all []identity) {
	next := controlplane.TokenLifetime / 2
	for {
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		next = controlplane.TokenLifetime / 2
		for _, who := range all {
			if err := s.writeToken(ctx, who); err != nil {
				s.opts.Log.Error("a token could not be renewed", "program", who.program, "error", err)
				next = time.Minute
			}
		}
	}
}
