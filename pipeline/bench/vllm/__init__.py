"""The benchmark inside vLLM, in an environment of its own."""
