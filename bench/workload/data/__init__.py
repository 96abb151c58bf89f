"""Training and validation batches, either synthetic or from a user's folder."""
