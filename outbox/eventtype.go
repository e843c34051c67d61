package outbox

import (
	"fmt"
	"slices"
	"strings"
)

// CheckEventType tells what is wrong with the name of an event type: it consists
// of two or more parts with dots between them, each of lower case letters,
// digits and underscores with a letter first, and its last word is a past
// participle, as in "order.placed" or "user.password_changed". Participles are
// words that end in "ed", and a list of irregular ones: a word that is missing
// there is refused, and a noun that ends in "ed" passes.
//
// Neither [Insert] nor the relay asks for it; [Inserter.CheckNames] does.
func CheckEventType(name string) error {
	parts := strings.Split(name, ".")
	if len(parts) < 2 {
		return fmt.Errorf("event type %q: want two or more parts, as in order.placed", name)
	}
	for _, part := range parts {
		if !isLowerCase(part) {
			return fmt.Errorf("event type %q: part %q does not begin with a letter, or has other characters "+
				"than a-z, 0-9 and _", name, part)
		}
	}
	last := parts[len(parts)-1]
	word := last[strings.LastIndexByte(last, '_')+1:]
	if !strings.HasSuffix(word, "ed") && !slices.Contains(irregular, word) {
		return fmt.Errorf("event type %q: name what has happened, in the past tense: "+
			"%q is no past participle", name, word)
	}
	return nil
}

func isLowerCase(part string) bool {
	if part == "" || part[0] < 'a' || part[0] > 'z' {
		return false
	}
	return !strings.ContainsFunc(part, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_'
	})
}

// irregular are participles of verbs that events are made of.
var irregular = strings.Fields(`
	begun bid born bought bound broken brought built burnt cast caught chosen cost cut dealt done drawn
	driven eaten fallen felt forbidden forgiven forgotten fought found frozen given gone got gotten
	grown had heard held hidden hit kept known laid learnt led left lent let lit lost made meant met
	overdrawn overridden overwritten paid put quit read rebuilt redone repaid rerun resent reset resold
	retaken rewritten ridden risen run said seen sent set shot shown shut sold spent split spoken spread
	stolen stood stuck sunk swept taken taught thought thrown told torn undergone understood undone
	unpaid upheld withdrawn withheld woken won worn written`)
