package browser

import (
	"bytes"
	"cmp"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
)

const (
	screenshots = "../../../docs/screenshots"
	largest     = 150 << 10 // bytes of one of them
)

// points is how many the charts have.
const points = `fetch('api/series?since=0', {headers: {Authorization: 'Bearer ' + sessionStorage.getItem('walpost.token')}}).then((r) => r.json()).then((s) => s.t.length)`

// testScreenshots writes the documents' pictures, with some minutes of load in the charts.
func testScreenshots(t *testing.T, r *rig, address string) {
	if !*update {
		t.Skip("-update writes docs/screenshots")
	}
	r.must(os.MkdirAll(screenshots, 0o755))
	b := r.newTab()
	b.open(address)
	b.do(`localStorage.setItem('walpost.range', 300)`)
	b.open(address)
	b.wait(`document.querySelectorAll('.plot canvas').length === 6`)
	for eval[int](b, points) < 130 {
		time.Sleep(time.Second)
	}
	heights := map[string]int64{"overview": 990, "slot": 920, "replay": 800, "consumers": 480, "held": 480}
	for _, view := range views {
		if view == "alarms" {
			continue // testAlarm raises one
		}
		b.size(1280, cmp.Or(heights[view], 720))
		b.view(view)
		switch view {
		case "doctor":
			b.tabTo("button", "Check both servers")
			b.keys(enter)
			b.wait(`document.querySelector('.finding')`)
		case "replay":
			b.do(`document.querySelector('main input[name=aggregate]').focus()`)
			b.keys("order", enter)
			b.wait(`document.querySelector('.result')`)
		case "tail":
			b.wait(`document.querySelectorAll('tbody tr').length > 30`)
		}
		b.picture(view)
	}
	b.size(1280, 720)
	b.view("dead-letters")
	b.keys("j")
	b.keys(enter)
	b.wait(`document.querySelector('dialog pre')`)
	b.picture("dead-letter")
	b.keys(esc)
	b.view("overview")
	b.size(390, 1100)
	b.picture("overview-phone")
	b.size(390, 780)
	b.view("dead-letters")
	b.picture("dead-letters-phone")
	b.view("overview")
	b.size(2560, 1240)
	b.picture("overview-wall")
	b.size(1280, 990)
	b.colours("dark")
	b.picture("overview-dark")
}

// picture waits until nothing moves, and writes what is seen in 256 colours.
func (b *browser) picture(name string) {
	b.t.Helper()
	b.do(`document.activeElement.blur()`)
	b.do(`new Promise((done) => setTimeout(done, 1500))`)
	shot, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	b.must(err)
	small, err := reduce(shot)
	if err == nil {
		err = os.WriteFile(filepath.Join(screenshots, name+".png"), small, 0o644)
	}
	b.must(err)
	b.t.Logf("%s.png: %d KB", name, len(small)>>10)
	if len(small) > largest {
		b.t.Errorf("%s.png has %d bytes, more than %d", name, len(small), largest)
	}
}

// apart leaves out colours that look like a more frequent one, and keeps 256.
func apart(all color.Palette) (kept color.Palette) {
	for _, c := range all {
		if len(kept) == 256 {
			break
		}
		if len(kept) == 0 || distance(c, kept[kept.Index(c)]) > 10 {
			kept = append(kept, c)
		}
	}
	return kept
}

func distance(a, b color.Color) (d int) {
	x, y := color.RGBAModel.Convert(a).(color.RGBA), color.RGBAModel.Convert(b).(color.RGBA)
	for _, one := range [][2]uint8{{x.R, y.R}, {x.G, y.G}, {x.B, y.B}} {
		d += max(int(one[0])-int(one[1]), int(one[1])-int(one[0]))
	}
	return d
}

// reduce keeps the 256 most frequent colours.
func reduce(shot []byte) ([]byte, error) {
	full, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		return nil, err
	}
	count := map[color.Color]int{}
	for y := range full.Bounds().Dy() {
		for x := range full.Bounds().Dx() {
			count[full.At(x, y)]++
		}
	}
	var palette color.Palette
	for c := range count {
		palette = append(palette, c)
	}
	slices.SortFunc(palette, func(a, b color.Color) int { return count[b] - count[a] })
	palette = apart(palette)
	paletted := image.NewPaletted(full.Bounds(), palette)
	draw.Draw(paletted, full.Bounds(), full, image.Point{}, draw.Src)
	var out bytes.Buffer
	err = (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, paletted)
	return out.Bytes(), err
}
