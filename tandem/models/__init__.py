"""Finding and fetching models: nothing here loads a weight."""
