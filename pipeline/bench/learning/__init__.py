"""The learning benchmark: a stream of real requests, served again under every update rule."""
