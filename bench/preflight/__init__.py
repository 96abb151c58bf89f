"""Check nodes before a study: a short job measures every node, and exchanges between all of them."""
