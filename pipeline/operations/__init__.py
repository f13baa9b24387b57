"""Looking after a stack: health, metrics, estimates, services on one machine."""
