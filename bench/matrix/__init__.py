"""What is to be measured: the matrix file, its schema, and the cells it expands to."""
