"""Request bodies as validated objects."""
