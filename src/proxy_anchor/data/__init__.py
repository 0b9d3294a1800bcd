"""Image tables, loaders of data sets, batches."""
