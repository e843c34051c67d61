package outbox

import (
	"fmt"
	"slices"
	"strings"
)

// CheckEventType returns an error where an event type is not named like "order.placed" or "user.logged_in".
// A name has two or more parts with dots between them. A part has lower case letters, digits and underscores,
// and begins with a letter. The last part has a past participle among its words: one that ends in "ed", or
// one of a list of irregular ones. A participle that the list lacks is refused, a noun in "ed" passes.
//
// [Insert] and the relay take any name. [Inserter.CheckNames] asks for this check.
func CheckEventType(name string) error {
	parts := strings.Split(name, ".")
	if len(parts) < 2 {
		return fmt.Errorf("event type %q: want two or more parts with dots between them, "+
			"as in order.placed", name)
	}
	for _, part := range parts {
		if !isLowerCase(part) {
			return fmt.Errorf("event type %q: part %q does not begin with a letter, or has other characters "+
				"than a-z, 0-9 and _", name, part)
		}
	}
	last := parts[len(parts)-1]
	if !slices.ContainsFunc(strings.Split(last, "_"), isParticiple) {
		return fmt.Errorf("event type %q: name what has happened, in the past tense, as in order.placed: "+
			"%q has no past participle", name, last)
	}
	return nil
}

func isParticiple(word string) bool {
	return strings.HasSuffix(word, "ed") || slices.Contains(irregular, word)
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
