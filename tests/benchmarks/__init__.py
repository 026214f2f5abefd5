"""What Penstock costs and how fast it is, each figure beside a bound or a peer of the same run: `make bench`."""
