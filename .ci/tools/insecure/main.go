// Command insecure looks with gosec for Go code that may be insecure, in the module around the working directory,
// and fails at findings that decided.txt does not name, and at lines of that file that no finding has any more.
package main

import (
	_ "embed"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/securego/gosec/v2"
	"github.com/securego/gosec/v2/analyzers"
	"github.com/securego/gosec/v2/issue"
	"github.com/securego/gosec/v2/rules"
)

//go:embed decided.txt
var decided string

func main() {
	log.SetFlags(0)
	log.SetPrefix("insecure: ")
	found, err := findings()
	if err != nil {
		log.Fatal(err)
	}
	wrong := compare(found, decisions(decided))
	for _, line := range wrong {
		fmt.Println(line)
	}
	if len(wrong) > 0 {
		log.Fatal("mend the code, or write the line into .ci/tools/insecure/decided.txt below a comment that says why it is safe")
	}
	log.Printf("%d findings, each decided", len(found))
}

// finding is one of gosec's, and in decisions one that was decided: there path may end with /, for all
// files below, and code may be *, for any.
type finding struct{ rule, path, code, what string }

func (f finding) String() string { return f.rule + " " + f.path + " " + f.code }

func (f finding) isDecidedBy(d finding) bool {
	return f.rule == d.rule && (f.path == d.path || strings.HasSuffix(d.path, "/") && strings.HasPrefix(f.path, d.path)) &&
		(f.code == d.code || d.code == "*")
}

// findings is what gosec finds in all packages but in their tests and in generated files.
func findings() ([]finding, error) {
	root, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	a := gosec.NewAnalyzer(gosec.NewConfig(), false, true, false, 2, log.New(io.Discard, "", 0))
	a.LoadRules(rules.Generate(false).RulesInfo())
	a.LoadAnalyzers(analyzers.Generate(false).AnalyzersInfo())
	packages, err := gosec.PackagePaths("./...", []*regexp.Regexp{regexp.MustCompile(`/\.[a-z]`), regexp.MustCompile(`node_modules`)})
	if err != nil {
		return nil, err
	}
	if err := a.Process(nil, packages...); err != nil {
		return nil, err
	}
	issues, metrics, errs := a.Report()
	for file, list := range errs {
		return nil, fmt.Errorf("%s: %v", file, list)
	}
	if metrics.NumFiles == 0 {
		return nil, fmt.Errorf("no Go file below %s", root)
	}
	var out []finding
	for _, i := range issues {
		path, err := filepath.Rel(root, i.File)
		if err != nil {
			return nil, err
		}
		out = append(out, finding{i.RuleID, filepath.ToSlash(path), line(i), i.What})
	}
	return out, nil
}

// line is the first line of the code that i is about.
func line(i *issue.Issue) string {
	number, _, _ := strings.Cut(i.Line, "-")
	for one := range strings.Lines(i.Code) {
		if code, ok := strings.CutPrefix(one, number+": "); ok {
			return strings.TrimSpace(code)
		}
	}
	return ""
}

func decisions(text string) []finding {
	var out []finding
	for one := range strings.Lines(text) {
		if f := strings.SplitN(strings.TrimSpace(one), " ", 3); len(f) == 3 && !strings.HasPrefix(one, "#") {
			out = append(out, finding{rule: f[0], path: f[1], code: f[2]})
		}
	}
	return out
}

// compare is a line for each finding without a decision, and for each decision without a finding.
func compare(found, decided []finding) []string {
	var out []string
	for _, f := range found {
		if !slices.ContainsFunc(decided, f.isDecidedBy) {
			out = append(out, "not decided ("+f.what+"): "+f.String())
		}
	}
	for _, d := range decided {
		if !slices.ContainsFunc(found, func(f finding) bool { return f.isDecidedBy(d) }) {
			out = append(out, "decided, but not found any more: "+d.String())
		}
	}
	return out
}
