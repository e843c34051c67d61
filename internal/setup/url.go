package setup

import (
	"net/url"
	"strings"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
)

// RelayURL is a URL for a role that is not the admin's, without a password: hosts, database and settings
// stay. It does not parse the hosts, of which a URL may have several.
func RelayURL(admin pg.Config, role, database string) (string, error) {
	text, err := admin.ReadURL()
	if err != nil {
		return "", err
	}
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok || scheme != "postgres" && scheme != "postgresql" {
		return "", hint.Errorf("write postgres://user@host:5432/database",
			"the connection string is no URL, and init makes the relay's URL from it")
	}
	end := len(rest)
	if i := strings.IndexAny(rest, "/?"); i >= 0 {
		end = i
	}
	hosts, rest := rest[:end], rest[end:]
	hosts = hosts[strings.LastIndexByte(hosts, '@')+1:]
	path, query, _ := strings.Cut(rest, "?")
	values, err := url.ParseQuery(query)
	if err != nil {
		return "", hint.Errorf("percent-encode what stands behind the ?", "the URL's settings cannot be read")
	}
	for _, own := range []string{"user", "password", "passfile", "sslpassword", "sslcert", "sslkey"} {
		values.Del(own) // the admin's
	}
	if strings.Trim(path, "/") == "" && !values.Has("dbname") && !values.Has("database") {
		path = "/" + url.PathEscape(database)
	}
	relay := scheme + "://" + url.User(role).String() + "@" + hosts + path
	if len(values) > 0 {
		relay += "?" + strings.ReplaceAll(values.Encode(), "+", "%20")
	}
	return relay, nil
}
