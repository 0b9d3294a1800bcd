"""Where the jobs of a sweep run, and the search for settings."""
