"""The web page at /: its routes, and its files in `static/`."""
