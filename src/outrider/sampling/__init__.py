"""From logits to tokens: noise, filters, penalties, log-probabilities. Must not know rows, caches or models."""
