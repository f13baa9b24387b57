"""Settings: tables of one TOML file, overridden by the environment."""
