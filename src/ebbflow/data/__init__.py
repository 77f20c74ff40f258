"""Which samples: a stateless shuffle, the exactly-once ledger, and `ElasticSampler`, which deals them out to torch."""
