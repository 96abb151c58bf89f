"""Training and validation batches: synthetic ones, or those of a user's folder."""
