"""Presets (the YAML files beside this one), and how a recipe is loaded and checked."""

from dropforge.recipes.load import load_recipe, parse_recipe, presets

__all__ = ["load_recipe", "parse_recipe", "presets"]
