package bench

import (
	"math"
	"strconv"
	"strings"
)

// chart is a line chart, laid out for a template that draws it as SVG. All positions are in the chart's own pixels.
type chart struct {
	Title, Unit   string
	Width, Height float64
	Left, Bottom  float64 // where the axes are
	XTicks        []tick
	YTicks        []tick
	Bands         []band
	Lines         []line
}

type tick struct {
	At    float64
	Label string
}

// band is a stretch of the x axis that has a name.
type band struct {
	From, Width float64
	Label       string
	Shaded      bool
}

type line struct {
	Name   string
	Class  string // its colour, s0 to s7
	Key    string // the same in the legend, k0 to k7
	Points string // "x,y x,y …"
	Dashed bool
}

// xy is a value to draw.
type xy struct{ x, y float64 }

// curve is the values of a line.
type curve struct {
	name   string
	values []xy
	color  int
	dashed bool
}

const (
	chartWidth, chartHeight = 860, 260
	chartLeft, chartTop     = 64, 14
	chartRight, chartBottom = 848, 226
	maxPoints               = 800 // of a line: more are thinned out, by keeping the highest
	colors                  = 8
	ticksWanted             = 5
	lowestLatency           = 0.001 // milliseconds: a logarithm needs a beginning
	decade                  = 10.0
)

// axis maps values to pixels.
type axis struct {
	low, high   float64
	logarithmic bool
	from, to    float64 // pixels
}

func (a axis) at(v float64) float64 {
	low, high := a.low, a.high
	if a.logarithmic {
		v, low, high = math.Log10(max(v, a.low)), math.Log10(low), math.Log10(high)
	}
	if high <= low {
		return a.from
	}
	return a.from + (min(max(v, low), high)-low)/(high-low)*(a.to-a.from)
}

// ticks are round values within the axis.
func (a axis) ticks() (all []tick) {
	if a.logarithmic {
		for v := math.Pow(decade, math.Ceil(math.Log10(a.low)-1e-9)); v <= a.high*(1+1e-9); v *= decade {
			all = append(all, tick{round(a.at(v)), axisText(v)})
		}
		return all
	}
	step := roundStep((a.high - a.low) / ticksWanted)
	for v := math.Ceil(a.low/step) * step; v <= a.high*(1+1e-9); v += step {
		all = append(all, tick{round(a.at(v)), axisText(v)})
	}
	return all
}

// roundStep is the next 1, 2 or 5 times a power of ten.
func roundStep(v float64) float64 {
	if v <= 0 {
		return 1
	}
	power := math.Pow(decade, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*power >= v {
			return m * power
		}
	}
	return decade * power
}

func axisText(v float64) string {
	switch {
	case v >= 1e9:
		return strconv.FormatFloat(v/1e9, 'g', 4, 64) + "G"
	case v >= 1e6:
		return strconv.FormatFloat(v/1e6, 'g', 4, 64) + "M"
	case v >= 1e4:
		return strconv.FormatFloat(v/1e3, 'g', 4, 64) + "k"
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

func round(v float64) float64 { return math.Round(v*10) / 10 }

// newChart lays curves out over x. Bands are in values of x.
func newChart(title, unit string, x axis, logarithmic bool, curves []curve, bands []band) chart {
	x.from, x.to = chartLeft, chartRight
	y := yAxis(curves, logarithmic)
	c := chart{
		Title: title, Unit: unit, Width: chartWidth, Height: chartHeight, Left: chartLeft, Bottom: chartBottom,
		XTicks: x.ticks(), YTicks: y.ticks(),
	}
	for i, b := range bands {
		from, to := x.at(b.From), x.at(b.From+b.Width)
		c.Bands = append(c.Bands, band{round(from), round(to - from), b.Label, i%2 == 1})
	}
	for _, cv := range curves {
		if len(cv.values) == 0 {
			continue
		}
		var points []string
		for _, v := range thin(cv.values) {
			points = append(points, strconv.FormatFloat(round(x.at(v.x)), 'f', -1, 64)+","+strconv.FormatFloat(round(y.at(v.y)), 'f', -1, 64))
		}
		c.Lines = append(c.Lines, line{
			Name: cv.name, Class: "s" + strconv.Itoa(cv.color%colors), Key: "k" + strconv.Itoa(cv.color%colors), Points: strings.Join(points, " "), Dashed: cv.dashed,
		})
	}
	return c
}

// yAxis spans all curves: from 0, or over whole decades.
func yAxis(curves []curve, logarithmic bool) axis {
	low, high := math.Inf(1), 0.0
	for _, c := range curves {
		for _, v := range c.values {
			if !logarithmic || v.y > 0 {
				low, high = min(low, v.y), max(high, v.y)
			}
		}
	}
	a := axis{logarithmic: logarithmic, from: chartBottom, to: chartTop, high: max(high*1.05, 1e-9)}
	if logarithmic {
		a.low = math.Pow(decade, math.Floor(math.Log10(max(min(low, high), lowestLatency))))
		a.high = max(a.low*decade, math.Pow(decade, math.Ceil(math.Log10(max(high, lowestLatency)))))
	}
	return a
}

// thin keeps the highest of each few values, when there are more than a screen shows.
func thin(values []xy) []xy {
	every := (len(values) + maxPoints - 1) / maxPoints
	if every <= 1 {
		return values
	}
	var out []xy
	for at := 0; at < len(values); at += every {
		top := values[at]
		for _, v := range values[at:min(at+every, len(values))] {
			if v.y > top.y {
				top = v
			}
		}
		out = append(out, top)
	}
	return out
}
