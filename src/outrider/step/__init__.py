"""The step on the device: gather rows, run the trunk, pick, accept, draft. The only code that runs the model."""
