package idempotency

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"io"
	"mime"
	"mime/multipart"
	"strings"
)

// Tags of request hashes. No JSON text in canonical form begins with a letter r or m.
const (
	rawTag       = "raw:"
	multipartTag = "multipart:"
)

// requestHash is the SHA-256 by which a repeated request is told from another one with the same key:
//
//   - of a JSON body in canonical form, so that white space, the order of members and escapes do not count;
//   - of the parts of a multipart body, because each attempt of a client has its own boundary;
//   - of any other body, and of one that is not what its Content-Type says, byte for byte.
func requestHash(contentType string, body []byte) []byte {
	kind, params, _ := mime.ParseMediaType(contentType)
	switch {
	case kind == "application/json" || strings.HasSuffix(kind, "+json"):
		if text, err := canonicalJSON(body); err == nil {
			sum := sha256.Sum256(text)
			return sum[:]
		}
	case strings.HasPrefix(kind, "multipart/") && params["boundary"] != "":
		if sum, err := hashParts(params["boundary"], body); err == nil {
			return sum
		}
	}
	h := sha256.New()
	io.WriteString(h, rawTag) //nolint:errcheck // a hash takes everything
	h.Write(body)
	return h.Sum(nil)
}

// hashParts hashes each part's name, file name, type and the hash of its content, in their order.
func hashParts(boundary string, body []byte) ([]byte, error) {
	if !bytes.HasSuffix(bytes.TrimRight(body, " \t\r\n"), []byte("--"+boundary+"--")) {
		return nil, io.ErrUnexpectedEOF // the reader takes a body that is cut for the end of the parts
	}
	h := sha256.New()
	io.WriteString(h, multipartTag) //nolint:errcheck // a hash takes everything
	for parts := multipart.NewReader(bytes.NewReader(body), boundary); ; {
		part, err := parts.NextRawPart()
		if err == io.EOF {
			return h.Sum(nil), nil
		}
		if err != nil {
			return nil, err
		}
		content := sha256.New()
		if _, err := io.Copy(content, part); err != nil {
			return nil, err
		}
		hashText(h, part.Header.Get("Content-Disposition"))
		hashText(h, part.Header.Get("Content-Type"))
		h.Write(content.Sum(nil))
	}
}

// hashText writes a text behind its length, so that no two lists of texts are written alike.
func hashText(h hash.Hash, s string) {
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(s))))
	io.WriteString(h, s) //nolint:errcheck // a hash takes everything
}
