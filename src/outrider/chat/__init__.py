"""Chat: from canonical messages to a prompt, and from an answer's text to typed events.

Must not know HTTP, nor the JSON of any API.
"""
