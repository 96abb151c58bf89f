"""Check nodes before a study: a short job measures every node, and exchanges messages between all nodes."""
