"""What the benchmark asks: one file a workload, all of it written for this project.

None of it occurs in the training data of the default model's head.
"""
