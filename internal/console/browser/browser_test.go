package browser

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// browser is one tab. It notes what the page asks, and every complaint of the browser.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	problems []string
	requests []string
}

// startChromium returns the context of the one browser that all tabs share.
func startChromium(t *testing.T) context.Context {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(chromium(t)), chromedp.NoSandbox)
	allocator, stop := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, end := chromedp.NewContext(allocator)
	t.Cleanup(func() {
		_ = chromedp.Cancel(ctx) // it waits for the browser's end
		end()
		stop()
	})
	if err := chromedp.Do(ctx); err != nil {
		t.Fatal(err)
	}
	return ctx
}

// newTab has an empty profile.
func (r *rig) newTab() *browser {
	r.t.Helper()
	ctx, end := chromedp.NewContext(r.chromium, chromedp.WithNewBrowserContext())
	r.t.Cleanup(func() {
		_ = chromedp.Cancel(ctx) // it waits for the tab's end
		end()
	})
	b := &browser{t: r.t, ctx: ctx}
	b.must(chromedp.Listen(ctx, b.hear))
	_, err := chromedp.Call(ctx, log.Enable, cdp.Empty{})
	b.must(err)
	_, err = chromedp.Call(ctx, network.Enable, network.EnableParams{})
	b.must(err)
	b.size(1280, 800)
	return b
}

func (b *browser) hear(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		b.problems = append(b.problems, "exception: "+fmt.Sprint(e.ExceptionDetails))
	case *runtime.EventConsoleAPICalled:
		for _, arg := range e.Args {
			b.problems = append(b.problems, fmt.Sprintf("console.%s: %s %s", e.Type, arg.Value, arg.Description))
		}
	case *log.EventEntryAdded:
		b.problems = append(b.problems, fmt.Sprintf("%s: %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL))
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.URL)
	}
}

// fine fails the test for what the browser has complained about, except for what is expected.
func (b *browser) fine(expected ...string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.problems {
		if !slices.ContainsFunc(expected, func(e string) bool { return strings.Contains(p, e) }) {
			b.t.Errorf("the browser says: %s", p)
		}
	}
	b.problems = nil
}

// asked returns the requests since the last call.
func (b *browser) asked() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	asked := b.requests
	b.requests = nil
	return asked
}

// part is a subtest in the same tab.
func (b *browser) part(t *testing.T, name string, test func()) {
	t.Run(name, func(t *testing.T) {
		outer := b.t
		b.t = t
		defer func() { b.t = outer }()
		test()
	})
}

func (b *browser) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *browser) run(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	b.must(chromedp.Do(b.ctx, actions...))
}

func (b *browser) size(width, height int64) {
	b.t.Helper()
	b.run(chromedp.EmulateViewport(width, height))
}

func (b *browser) colours(scheme string) {
	b.t.Helper()
	_, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	})
	b.must(err)
}

// open loads the page. A URL that differs in the fragment alone would not do so.
func (b *browser) open(url string) {
	b.t.Helper()
	b.run(chromedp.Navigate("about:blank"), chromedp.Navigate(url))
}

// view goes to a view and waits until it shows its data.
func (b *browser) view(id string) {
	b.t.Helper()
	b.do(fmt.Sprintf("location.hash = '#/%s'", id))
	b.wait(`document.querySelector('#nav [aria-current]')?.hash === '#/` + id + `' && !document.querySelector('.loading') && document.querySelector('main h1')`)
}

// do runs a statement, and waits for a promise.
func (b *browser) do(js string) {
	b.t.Helper()
	b.run(chromedp.Evaluate[chromedp.Void](js, chromedp.EvalAwaitPromise))
}

func eval[T any](b *browser, js string) T {
	b.t.Helper()
	value, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](js, chromedp.EvalAwaitPromise))
	b.must(err)
	return value
}

// wait waits until the expression is true.
func (b *browser) wait(js string) {
	b.t.Helper()
	deadline := time.Now().Add(patience)
	for !eval[bool](b, "(async () => !!("+js+"))()") {
		if time.Now().After(deadline) {
			b.t.Fatalf("%s: not within %s; the page says:\n%s", js, patience, b.text("body"))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// waitFresh is wait, and has the page ask again meanwhile: it would by itself, some seconds later.
func (b *browser) waitFresh(js string) {
	b.t.Helper()
	b.wait(`(document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'r', bubbles: true})), ` + js + `)`)
}

func (b *browser) count(selector string) int {
	b.t.Helper()
	return eval[int](b, fmt.Sprintf("document.querySelectorAll(%q).length", selector))
}

func (b *browser) text(selector string) string {
	b.t.Helper()
	return eval[string](b, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))
}

// keys types them one after the other into what has the focus.
func (b *browser) keys(keys ...string) {
	b.t.Helper()
	for _, key := range keys {
		b.run(chromedp.KeyEvent(key))
	}
}

const (
	tab   = kb.Tab
	enter = kb.Enter
	down  = kb.ArrowDown
	esc   = kb.Escape
)

// tabTo presses Tab until an element that fits the selector and the text has the focus.
func (b *browser) tabTo(selector, text string) {
	b.t.Helper()
	for range 80 {
		if eval[bool](b, fmt.Sprintf("document.activeElement.matches(%q) && document.activeElement.innerText.startsWith(%q)", selector, text)) {
			return
		}
		b.keys(tab)
	}
	b.t.Fatalf("Tab does not reach %s %q", selector, text)
}
