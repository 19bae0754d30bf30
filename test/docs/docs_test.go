// Package docs_test holds the documents to what is there: a test that they name exists, and a link leads somewhere.
package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// sources gives the text of the files with that ending, by their path from the root.
func sources(t *testing.T, ending string) map[string]string {
	t.Helper()
	texts := map[string]string{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			if name := e.Name(); strings.HasPrefix(name, ".") && path != root || name == "bin" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ending) {
			return nil
		}
		text, err := os.ReadFile(path)
		texts[strings.TrimPrefix(path, root+"/")] = string(text)
		return err
	})
	if err != nil || len(texts) == 0 {
		t.Fatalf("looking for *%s: %d found, %v", ending, len(texts), err)
	}
	return texts
}

var (
	function = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	// named is a test that a document names, and one of its checks where that is said.
	named = regexp.MustCompile("`(Test\\w+)`(?: \"([^\"]+)\")?")
	link  = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)
)

func TestEveryTestThatADocumentNamesIsThere(t *testing.T) {
	var tests []string
	var code strings.Builder
	for path, text := range sources(t, ".go") {
		if strings.HasSuffix(path, "_test.go") {
			for _, f := range function.FindAllStringSubmatch(text, -1) {
				tests = append(tests, f[1])
			}
		}
		code.WriteString(text)
	}
	found := 0
	for path, text := range sources(t, ".md") {
		for _, n := range named.FindAllStringSubmatch(text, -1) {
			found++
			if !slices.Contains(tests, n[1]) {
				t.Errorf("%s names %s, which is no test", path, n[1])
			}
			if n[2] != "" && !strings.Contains(code.String(), `"`+n[2]) {
				t.Errorf("%s names the check %q of %s, which no test has", path, n[2], n[1])
			}
		}
	}
	if found < 50 {
		t.Errorf("only %d tests are named in documents: are they read?", found)
	}
}

func TestEveryLinkOfADocumentLeadsToAFile(t *testing.T) {
	for path, text := range sources(t, ".md") {
		for _, l := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(l[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, filepath.Dir(path), l[1])); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
	}
}
