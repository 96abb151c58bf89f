"""The commands of `bench`: one module per verb, and what they share."""
