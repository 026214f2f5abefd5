"""Faults on real processes: crashes, freezes and a broker that dies, and a checker for what they must not change."""
