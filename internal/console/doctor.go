package console

import (
	"context"
	"net/http"
	"time"

	"github.com/walpost/walpost/internal/check"
)

// keepFindings is how long viewers share the doctor's findings: it asks much, on connections of its own.
const keepFindings = 5 * time.Second

func (c *Console) doctor(_ http.ResponseWriter, r *http.Request) (any, error) {
	return c.once(r.Context(), "doctor", keepFindings, func(ctx context.Context) (any, error) {
		found, err := c.cfg.Doctor(ctx)
		return map[string]any{"findings": append(check.Findings{}, found...)}, err
	})
}
