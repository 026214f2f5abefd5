"""Threats: what hostile bytes, names, neighbours and connections must not achieve. `python -m tests.threats` fuzzes."""
