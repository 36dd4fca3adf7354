"""Engines of other frameworks that train a scheduled model: `build(sch, target=...)`."""
