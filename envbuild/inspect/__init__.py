"""Readers and comparison of artifacts of any kind."""
