"""`envbuild bisect`: the package, or packages, by which one of two locks gives a broken or slow environment."""
