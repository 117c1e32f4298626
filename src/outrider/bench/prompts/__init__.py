"""The benchmark's questions: one file for each workload, all written for this project.

None of them is in the training data of the default model's head.
"""
