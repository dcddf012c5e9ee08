"""Checks of this host, verdicts on each kind of artifact on it, and checks of site files."""
