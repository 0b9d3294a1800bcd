"""Reports: tables, curves and pictures from what a run has written."""
