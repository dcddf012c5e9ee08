"""Locks: resolve the wheels, conda packages and base images of a recipe, and judge whether a lock is current."""
