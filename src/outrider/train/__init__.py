"""Training MTP heads for models that have none: a frozen trunk teaches its own head, on any device.

    conversations   the model talks to itself, through the engine
    batches         which exchanges a step sees: a pure function of the data, the seed and the step
    chain           the head over whole sequences, recursing as it will when it drafts
    loss            how far its guesses are from the trunk's own distribution
    trainer         steps, milestones, checkpoints
    evaluate        how many drafts would stand, on exchanges that were held out
    run             all of it, from a model folder to a head file

Stands beside `llm` and `build`: it uses the engine, and nothing below knows of it.
"""
