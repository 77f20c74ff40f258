"""Which samples a step has: a stateless shuffle, the exactly-once ledger, and `ElasticSampler` for torch."""
