"""The Parquet log: written, compacted, and freed of what is to be forgotten."""
