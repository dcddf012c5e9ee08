"""Recipes: what an environment shall contain and how it is proven (docs/reference/recipe.md)."""
