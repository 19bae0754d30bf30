package oci

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"unicode"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"imp.dev/imp/internal/fault"
	"imp.dev/imp/internal/image/oci/build"
	"imp.dev/imp/internal/image/oci/flatten"
)

// diskError is a failure of this node's disk.
type diskError struct{ err error }

func (d *diskError) Error() string { return d.err.Error() }
func (d *diskError) Unwrap() error { return d.err }

func onDisk(err error) error {
	if err == nil {
		return nil
	}
	return fault.New(fault.DiskFailed, "storing image", &diskError{err})
}

// wrongBlob is content that is not what the manifest says. The registry may be mended, so it is tried again.
type wrongBlob struct{ text string }

func (w *wrongBlob) Error() string { return w.text }

// explain makes an error of the registry client one that a user can act on: it names the registry and the cause, and holds no
// secret, whatever the registry wrote into its answer. The original does not stay in the chain, since it does hold some.
func (s *session) explain(ctx context.Context, err error) error {
	known := (*fault.Error)(nil)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if flatten.IsRefused(err) || errors.As(err, &known) {
		return err
	}
	disk := (*diskError)(nil)
	if errors.As(err, &disk) {
		return buildError(disk)
	}
	return errors.New(s.scrub(s.say(err)))
}

func (s *session) say(err error) string {
	host, repository := s.ask.host(), s.ask.reference.Context().RepositoryStr()
	answer, wrong := (*transport.Error)(nil), (*wrongBlob)(nil)
	switch {
	case errors.As(err, &wrong):
		return fmt.Sprintf("registry %s sent something wrong: %s", host, wrong.text)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Sprintf("registry %s cannot be reached: it did not answer within %v", host, 2*s.stall)
	case errors.Is(err, errStalled):
		return fmt.Sprintf("registry %s: %v (%v)", host, errStalled, s.stall)
	case errors.As(err, &answer):
		detail := s.diagnostics(answer)
		switch answer.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			who := "the credentials that were given for it"
			if s.candidate.anonymous {
				who = "access without credentials (none was given for this registry)"
			}
			return fmt.Sprintf("registry %s refused %s: %d %s for repository %s%s", host, who, answer.StatusCode, http.StatusText(answer.StatusCode), repository, detail)
		case http.StatusNotFound:
			which := s.ask.Digest
			if which == "" {
				which = s.ask.reference.Identifier()
			}
			return fmt.Sprintf("registry %s has no image %s of repository %s; push it and the VM goes on%s", host, which, repository, detail)
		case http.StatusTooManyRequests:
			return fmt.Sprintf("registry %s allows no more requests for now: 429 Too Many Requests%s", host, detail)
		}
		return fmt.Sprintf("registry %s answered %d %s%s", host, answer.StatusCode, http.StatusText(answer.StatusCode), detail)
	}
	text := queries.ReplaceAllString(err.Error(), "")
	if strings.Contains(text, "does not match requested digest") {
		return fmt.Sprintf("registry %s sent something wrong: digest mismatch: %s", host, text)
	}
	return fmt.Sprintf("registry %s cannot be reached: %s", host, text)
}

// queries of URLs carry signatures and tokens.
var queries = regexp.MustCompile(`\?[^\s"']*`)

// diagnostics is what the registry says itself. Secrets go before it is cut, or a part of one could stay.
func (s *session) diagnostics(answer *transport.Error) string {
	var out []string
	for _, d := range answer.Errors {
		out = append(out, strings.TrimSpace(string(d.Code)+" "+d.Message))
	}
	if len(out) == 0 {
		return ""
	}
	return " (it says: " + printable(s.scrub(strings.Join(out, "; "))) + ")"
}

func (s *session) scrub(text string) string {
	for _, c := range s.ask.tries {
		for _, secret := range c.secrets() {
			text = strings.ReplaceAll(text, secret, "[secret]")
		}
	}
	return text
}

// printable keeps what strangers wrote short and harmless to a terminal.
func printable(text string) string {
	const most = 300
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}

func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, build.ErrReserve)
}

// buildError tells a full disk from other failures of the node.
func buildError(err error) error {
	if isFull(err) {
		return fault.New(fault.DiskFailed, "building base", fmt.Errorf("the node's disk is full: %w", err))
	}
	return fault.New(fault.DiskFailed, "building base", err)
}
