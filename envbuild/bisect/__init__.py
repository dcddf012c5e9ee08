"""`envbuild bisect`: the packages that make one of two locks give a broken or slow environment."""
