"""Training of MTP heads for models that have none. The frozen trunk teaches its own head, on any device.

    conversations   the model talks to itself, through the engine
    batches         the exchanges of each step: a pure function of the data, the seed and the step
    chain           the head over whole sequences, with the recursion that it does when it drafts
    loss            the distance between the head's guesses and the trunk's distribution
    trainer         steps, milestones, checkpoints
    evaluate        how many drafts would be accepted, on held-out exchanges
    run             all stages, from a model folder to a head file

`train` uses the engine through `llm`. No package below imports `train`.
"""
