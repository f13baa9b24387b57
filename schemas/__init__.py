"""The contracts: events, their wire and Parquet forms, and the one error that refuses them."""
