"""A package of your own."""
