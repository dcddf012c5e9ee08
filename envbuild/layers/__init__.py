"""Layers: the content of an artifact, from wheels, conda packages, Debian packages and sources, cached by digest."""
