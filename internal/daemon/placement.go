// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// QueueGroup is a number of queues and the loops that serve them in turn: the first queue is on First, the next one on
// the loop after it, and behind Last it begins again. Loops are counted from 0.
type QueueGroup struct {
	Queues      int
	First, Last int
}

// groups are the queues of the disk when there are that many loops.
func (c *DiskConfig) groups(loops int) []QueueGroup {
	if c.Groups != nil {
		return c.Groups
	}
	first, last := 0, loops-1
	if c.Loop != nil {
		first, last = *c.Loop, *c.Loop
	}
	n := c.Queues
	if n == 0 {
		n = last - first + 1
	}
	return []QueueGroup{{n, first, last}}
}

// validateQueues checks where the queues are to run.
func (c *DiskConfig) validateQueues(loops int) error {
	switch {
	case c.Queues < 0 || c.Queues > QueuesMax:
		return fmt.Errorf("queues is %d (want 1 to %d)", c.Queues, QueuesMax)
	case c.Loop != nil && (*c.Loop < 0 || *c.Loop >= loops):
		return noLoop(*c.Loop, loops)
	case c.Groups == nil:
		return nil
	case c.Loop != nil:
		return fmt.Errorf("queues are given loops and the disk is given loop %d (leave one out)", *c.Loop)
	}
	sum := 0
	for _, g := range c.Groups {
		switch {
		case g.Queues < 1 || g.Queues > QueuesMax:
			return fmt.Errorf("%d queues are given loops (want 1 to %d)", g.Queues, QueuesMax)
		case g.First < 0 || g.Last < g.First:
			return fmt.Errorf("loops %d-%d are no range", g.First, g.Last)
		case g.Last >= loops:
			return noLoop(g.Last, loops)
		case g.Queues <= g.Last-g.First:
			return fmt.Errorf("%d queues cannot use the %d loops %d-%d (give them fewer)", g.Queues, g.Last-g.First+1, g.First, g.Last)
		}
		sum += g.Queues
	}
	if sum != c.Queues {
		return fmt.Errorf("%d queues are given loops, there are %d", sum, c.Queues)
	}
	return nil
}

func noLoop(loop, loops int) error {
	return fmt.Errorf("loop %d does not exist (there are %d, counted from 0)", loop, loops)
}

// place tells which loops serve the disk, in order, and for each queue the index of its loop among them.
func (c *DiskConfig) place(loops int) (used, loopOf []int) {
	var at []int
	for _, g := range c.groups(loops) {
		for i := range g.Queues {
			at = append(at, g.First+i%(g.Last-g.First+1))
		}
	}
	if c.Groups == nil { // a disk is known to all its loops, also to those that no queue is on
		for l := range loops {
			if c.Loop == nil || *c.Loop == l {
				used = append(used, l)
			}
		}
	} else {
		used = slices.Clone(at)
		slices.Sort(used)
		used = slices.Compact(used)
	}
	for _, l := range at {
		i, _ := slices.BinarySearch(used, l)
		loopOf = append(loopOf, i)
	}
	return used, loopOf
}

// placement is where the queues run, in words: "0-3 on loop 0, 4-7 on loops 1-2".
func (c *DiskConfig) placement(loops int) string {
	var parts []string
	next := 0
	for _, g := range c.groups(loops) {
		word := "loop "
		if g.Last > g.First {
			word = "loops "
		}
		parts = append(parts, span(next, next+g.Queues-1)+" on "+word+span(g.First, g.Last))
		next += g.Queues
	}
	return strings.Join(parts, ", ")
}

// single is placement for a disk whose queues are all on one loop.
func single(queues, loop int) string { return span(0, queues-1) + " on loop " + span(loop, loop) }

func span(first, last int) string {
	if first == last {
		return strconv.Itoa(first)
	}
	return fmt.Sprintf("%d-%d", first, last)
}
