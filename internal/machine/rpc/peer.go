package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
)

// peerCredentials is a transport that adds nothing to the bytes and lets in only processes of certain users of this host:
// the socket's mode keeps others out as well, but a mode can be changed by mistake and a peer's uid cannot.
type peerCredentials struct{ allowed map[uint32]bool }

// PeerInfo is who is at the other end, as the kernel says.
type PeerInfo struct {
	credentials.CommonAuthInfo
	UID uint32
	PID int32
}

// AuthType implements credentials.AuthInfo.
func (PeerInfo) AuthType() string { return "peercred" }

func newPeerCredentials(uids []uint32) credentials.TransportCredentials {
	p := &peerCredentials{allowed: map[uint32]bool{}}
	for _, uid := range uids {
		p.allowed[uid] = true
	}
	return p
}

// ServerHandshake reads SO_PEERCRED (unix(7)) of a new connection.
func (p *peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	peer, err := peerOf(conn)
	if err != nil {
		return nil, nil, err
	}
	if !p.allowed[peer.UID] {
		return nil, nil, fmt.Errorf("refusing peer with uid %d (pid %d): not the agent's uid", peer.UID, peer.PID)
	}
	return conn, *peer, nil
}

// ClientHandshake is never used: the client dials without credentials of its own.
func (p *peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("peer credentials are for the server's side")
}

// Info implements credentials.TransportCredentials.
func (p *peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "peercred"}
}

// Clone implements credentials.TransportCredentials.
func (p *peerCredentials) Clone() credentials.TransportCredentials { return p }

// OverrideServerName implements credentials.TransportCredentials; there is no name.
func (p *peerCredentials) OverrideServerName(string) error { return nil }

func peerOf(conn net.Conn) (*PeerInfo, error) {
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("reading peer credentials: %T is no UNIX socket", conn)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("reading peer credentials: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, fmt.Errorf("reading peer credentials: %w", err)
	}
	if credErr != nil {
		return nil, fmt.Errorf("reading peer credentials: %w", credErr)
	}
	return &PeerInfo{UID: cred.Uid, PID: cred.Pid, CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}, nil
}
