"""Readers and reports for what the profiling scripts record."""
