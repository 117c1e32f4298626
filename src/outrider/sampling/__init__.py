"""From logits to tokens: noise, filters, penalties, log-probabilities. Must not know caches or models."""
