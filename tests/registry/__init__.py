"""Tests of registry/."""
