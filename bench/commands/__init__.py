"""The commands of `bench`: one module per verb, and the modules that they share."""
