package translate

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Sizes in bytes of texts on the object.
const (
	maxConsoleTail = 1 << 10
	maxMessage     = 1 << 10
)

// lineBreak stands for a line's end in a text that holds no control characters.
const lineBreak = " | "

// terminalCodes matches ECMA-48 control sequences and OSC strings: colours and titles that consoles are full of.
func terminalCodes() *regexp.Regexp {
	return regexp.MustCompile(`\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]`)
}

// ConsoleTail makes the end of a guest's console fit for an object that is shown on terminals: at most 1 KiB of valid,
// printable UTF-8 without control characters. Line ends become " | ".
func ConsoleTail(raw []byte) string {
	text := printable(string(raw))
	if len(text) <= maxConsoleTail {
		return text
	}
	cut := len(text) - maxConsoleTail
	for !utf8.RuneStart(text[cut]) {
		cut++
	}
	return strings.TrimSpace(text[cut:])
}

// Message makes text that may come from a registry, a VMM or a guest fit for a condition: printable and at most 1 KiB.
func Message(text string) string {
	text = printable(text)
	if len(text) <= maxMessage {
		return text
	}
	cut := maxMessage - len("…")
	for !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut] + "…"
}

func printable(text string) string {
	text = terminalCodes().ReplaceAllString(text, "")
	text = strings.ToValidUTF8(text, "\uFFFD")
	lines := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' })
	kept := lines[:0]
	for _, line := range lines {
		line = strings.TrimSpace(strings.Map(func(r rune) rune {
			switch {
			case unicode.IsSpace(r):
				return ' '
			case unicode.IsPrint(r):
				return r
			default:
				return -1
			}
		}, line))
		if line != "" {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, lineBreak)
}
