module github.com/sluice-blk/sluice

go 1.26.7

require golang.org/x/sys v0.50.0 // indirect
