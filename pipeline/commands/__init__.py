"""Groups of the command line."""
