package translate

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestConsoleTail(t *testing.T) {
	cases := map[string]struct{ raw, want string }{
		"lines are joined":                   {"one\r\ntwo\n\n\nthree\n", "one | two | three"},
		"colours and titles are dropped":     {"\x1b[1;31mred\x1b[0m \x1b]0;title\x07plain", "red plain"},
		"tabs become spaces":                 {"a\tb", "a b"},
		"broken UTF-8 is shown as broken":    {"a\xffb", "a\uFFFDb"},
		"what cannot be printed is dropped":  {"a\x00\x07\u202eb", "ab"},
		"an empty console is an empty text":  {"", ""},
		"a line of nothing but noise is not": {"\x1b[2J\n\x00\nreal", "real"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if got := ConsoleTail([]byte(c.raw)); got != c.want {
				t.Errorf("tail is %q, want %q", got, c.want)
			}
		})
	}
	t.Run("of a long console the end is kept", func(t *testing.T) {
		got := ConsoleTail([]byte(strings.Repeat("ü", 4000) + "last words"))
		if !strings.HasSuffix(got, "last words") || len(got) > maxConsoleTail || len(got) < maxConsoleTail-2 {
			t.Errorf("%d bytes: %q", len(got), got)
		}
	})
}

func TestTextsOfOthersAreFitForAnObject(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		raw := rapid.SliceOfN(rapid.Byte(), 0, 5000).Draw(t, "raw")
		for _, got := range []string{ConsoleTail(raw), Message(string(raw))} {
			if len(got) > 1024 || !utf8.ValidString(got) {
				t.Fatalf("%d bytes, valid %v", len(got), utf8.ValidString(got))
			}
			for _, r := range got {
				if unicode.IsControl(r) {
					t.Fatalf("control character %q", r)
				}
			}
		}
	})
}
