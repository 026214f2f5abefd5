"""Tests of workers/."""
