"""Shipped recipes, loaded by name through `quantkit.recipe.load_recipe`."""
