"""Tests of workers/streaming/."""
