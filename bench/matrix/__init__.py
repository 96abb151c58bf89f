"""The matrix file: YAML with line numbers, its schema, and the cells that it expands to."""
