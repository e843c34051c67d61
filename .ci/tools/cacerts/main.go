// Command cacerts prints the certificate authorities that Go's module has, as PEM, for the image. They depend on
// go.mod only, and so does the image.
package main

import (
	"encoding/pem"
	"fmt"
	"os"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

func main() {
	for root := range bundle.Roots() {
		if root.Constraint != nil {
			continue // trusted for some certificates only, which PEM cannot say
		}
		if err := pem.Encode(os.Stdout, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
