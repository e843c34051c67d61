package hint_test

import (
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/walpost/walpost/internal/hint"
)

func TestOf(t *testing.T) {
	inner := hint.Errorf("grant it", "read table: %w", io.EOF)
	tests := []struct {
		name string
		err  error
		want string
		text string
	}{
		{"plain", io.EOF, "", "EOF"},
		{"hinted", inner, "grant it", "read table: EOF"},
		{"through a wrap", fmt.Errorf("start: %w", inner), "grant it", "start: read table: EOF"},
		{"through a join", errors.Join(errors.New("a"), inner), "grant it", "a\nread table: EOF"},
		{"outermost wins", hint.Wrap(inner, "run migrate"), "run migrate", "read table: EOF"},
		{"empty hint hides nothing", hint.Wrap(inner, ""), "grant it", "read table: EOF"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := hint.Of(tt.err); got != tt.want {
				t.Errorf("hint = %q, want %q", got, tt.want)
			}
			if tt.err.Error() != tt.text {
				t.Errorf("text = %q, want %q", tt.err, tt.text)
			}
			if tt.text != "a\nread table: EOF" && !errors.Is(tt.err, io.EOF) {
				t.Error("the cause is lost")
			}
		})
	}
	if hint.Of(nil) != "" || hint.Wrap(nil, "x") != nil {
		t.Error("nil must stay nil")
	}
}
