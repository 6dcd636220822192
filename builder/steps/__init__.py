"""One module for each command that does something, each with one function to read from top to bottom."""
