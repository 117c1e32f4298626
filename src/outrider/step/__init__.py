"""The step on the device: run the trunk, sample, accept, draft. The only code that serves with the model."""
