"""Benchmarks: one script a question, each printing a table beside its peers and writing JSON."""
