"""The step on the device: run the trunk, pick, accept, draft. The only code that runs the model."""
