// Command helm prints what Helm makes of a chart and a file of values, and refuses what Helm refuses.
package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

func main() {
	text, err := render(os.Args[1], os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Print(text)
}

func render(chart, file string) (string, error) {
	c, err := loader.Load(chart)
	if err != nil {
		return "", err
	}
	given, err := chartutil.ReadValuesFile(file)
	if err != nil {
		return "", err
	}
	release := chartutil.ReleaseOptions{Name: "walpost", Namespace: "default", IsInstall: true}
	values, err := chartutil.ToRenderValues(c, given, release, nil) // checks values.schema.json
	if err != nil {
		return "", err
	}
	rendered, err := engine.Render(c, values)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(rendered)) {
		b.WriteString("---\n" + rendered[name] + "\n")
	}
	return b.String(), nil
}
