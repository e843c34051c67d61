package idempotency

import (
	"context"
	"net/http"
	"runtime/debug"
	"sync"
)

// execution is one run of a handler. It belongs to the goroutine that serves the request, except busy.
type execution struct {
	*middleware
	claim    *claim // nil: the request has no key, and nothing is stored
	response *response
	outcome  outcome
	usedTx   bool
	replay   *stored // what is answered in place of the response

	busy sync.Mutex // held while a Tx runs
}

// outcome is what becomes of the key when the handler has returned.
type outcome int

const (
	// keep: the response is stored, and repetitions get it.
	keep outcome = iota
	// done: the response was stored by the transaction.
	done
	// free: the response is sent, and a repetition is executed again.
	free
	// retry: there was no effect, or that is not known. The client is told to repeat the request.
	retry
)

type contextKey struct{}

// serve runs the handler, stores its response and sends it.
func (x *execution) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), x.Timeout)
	defer cancel()
	if x.claim != nil {
		x.leases.add(x.claim)
	}
	returned := false
	defer func() {
		var cause any
		if !returned {
			cause = recover()
			x.interrupted(ctx, cause)
		}
		x.settle(ctx)
		x.answer(w, returned, cause)
	}()
	next.ServeHTTP(x.response, r.WithContext(context.WithValue(ctx, contextKey{}, x)))
	returned = true
}

// interrupted decides what becomes of the key after a panic. A transaction was rolled back; what else the
// handler has done is not known, and it must not be done again.
func (x *execution) interrupted(ctx context.Context, cause any) {
	if cause != nil && cause != http.ErrAbortHandler {
		x.Logger.ErrorContext(ctx, "handler panicked", "panic", cause, "stack", string(debug.Stack()))
	}
	switch {
	case x.response.decided: // by a transaction that has ended
	case x.usedTx:
		x.outcome = retry
	default:
		x.outcome = keep
		x.response.fail(newProblem(http.StatusInternalServerError, "the request failed"))
	}
}

// answer ends the request. A response of which a part was sent cannot be taken back: there the connection is
// closed.
func (x *execution) answer(w http.ResponseWriter, returned bool, cause any) {
	switch {
	case !returned && cause == nil: // the goroutine ends
	case cause == http.ErrAbortHandler, !returned && x.response.streaming():
		panic(http.ErrAbortHandler)
	case x.replay != nil:
		x.replay.replay(w)
	default:
		x.response.send(w)
	}
}

// settle stores the response, or releases the key.
func (x *execution) settle(ctx context.Context) {
	if x.claim != nil {
		defer x.leases.remove(x.claim)
	}
	if x.response.status == 0 && x.outcome != retry {
		x.complete()
	}
	if x.outcome == keep && x.response.oneOf(x.RetryOn) {
		x.outcome = free
	}
	switch {
	case x.outcome == retry:
		x.giveUp(ctx)
	case x.claim == nil || x.outcome == done:
	case x.outcome == free:
		if _, _, err := x.store.release(ctx, x.claim); err != nil {
			x.Logger.WarnContext(ctx, "release idempotency key", "error", err)
		}
	default:
		x.save(ctx)
	}
}

// complete is for a handler that wrote nothing.
func (x *execution) complete() {
	if x.usedTx {
		x.response.fail(newProblem(http.StatusInternalServerError, "the request failed"))
		return
	}
	x.response.WriteHeader(http.StatusOK)
}

// giveUp releases the key. Where another execution has it, or this one's transaction was committed after all,
// the row has the answer.
func (x *execution) giveUp(ctx context.Context) {
	x.response.fail(unavailable("the request had no effect, or that is not known"))
	if x.claim == nil {
		return
	}
	_, found, err := x.store.release(ctx, x.claim)
	if err != nil {
		x.Logger.WarnContext(ctx, "release idempotency key", "error", err)
		return
	}
	x.answerFrom(found)
}

func (x *execution) answerFrom(found *row) {
	if found != nil && found.sameHash && found.state != "pending" && !x.response.streaming() {
		x.replay = &found.stored
	}
}

// save stores the response of a handler whose effect is outside of a transaction, or was rolled back.
func (x *execution) save(ctx context.Context) {
	owned, err := x.store.save(ctx, x.claim, x.response)
	switch {
	case err != nil:
		x.Logger.ErrorContext(ctx, "store response: a repetition will be executed again", "error", err)
	case !owned && x.usedTx:
		x.giveUp(ctx)
	case !owned:
		x.Logger.ErrorContext(ctx, "idempotency lease lost: the request may have been executed twice",
			"key", x.claim.key, "scope", x.claim.scope,
			"hint", "look for long pauses of this process, or of its connection to PostgreSQL")
		_, found, _ := x.store.release(ctx, x.claim)
		x.answerFrom(found)
	}
}
