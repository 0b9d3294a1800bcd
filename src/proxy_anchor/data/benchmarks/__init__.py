"""One loader per benchmark: a function from a folder to tables."""
