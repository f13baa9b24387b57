"""The proposer inside vLLM, connected: settings, event log, metrics."""
