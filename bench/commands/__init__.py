"""The commands of `bench`: one module per command, and modules that several commands share."""
