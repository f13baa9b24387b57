"""How drafter weights move: one file per rule behind the contract of ``update``."""
