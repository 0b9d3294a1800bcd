"""Images: one table type, one image dataset, one loader function per benchmark, one data module."""
