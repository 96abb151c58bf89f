"""Check nodes before a study: a short job measures every node, and the links of a ring."""
