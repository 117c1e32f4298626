"""Conversations: from canonical messages to a prompt, and from an answer's text to typed events.

Must not know HTTP, nor any API's JSON: three APIs translate to and from what is here.
"""
