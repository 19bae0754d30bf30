package schedule

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Refusal is what one node has against a VM.
type Refusal struct {
	Node    string
	Reasons []Reason
}

func (r Refusal) text() string {
	texts := make([]string, len(r.Reasons))
	for i, reason := range r.Reasons {
		texts[i] = reason.Text
	}
	return r.Node + ": " + strings.Join(texts, ", ")
}

// Refusals of all nodes.
type Refusals []Refusal

// Message tells every node's refusal in at most limit bytes: each by its name while there is room, else counted by what they
// have in common, the most frequent first. The same refusals in any order give the same message, so that it changes only
// when there is something new to read.
func (r Refusals) Message(limit int) string {
	if len(r) == 0 {
		return "the cluster has no nodes"
	}
	texts := make([]string, len(r))
	for i, refusal := range r {
		texts[i] = refusal.text()
	}
	slices.Sort(texts)
	const manyToRead = 8
	if message := strings.Join(texts, "; "); len(r) <= manyToRead && len(message) <= limit {
		return message
	}
	return cut(fmt.Sprintf("none of %d nodes fits: %s", len(r), r.counted()), limit)
}

func (r Refusals) counted() string {
	counts := map[string]int{}
	for _, refusal := range r {
		for _, reason := range refusal.Reasons {
			counts[reason.Group]++
		}
	}
	groups := make([]string, 0, len(counts))
	for group := range counts {
		groups = append(groups, group)
	}
	slices.SortFunc(groups, func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
	})
	for i, group := range groups {
		groups[i] = fmt.Sprintf("%d %s", counts[group], group)
	}
	return strings.Join(groups, "; ")
}

func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	const mark = "…"
	end := max(limit-len(mark), 0)
	for end > 0 && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + mark
}
