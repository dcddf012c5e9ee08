"""Recipes: the contents of an environment and the settings of its verification (docs/reference/recipe.md)."""
