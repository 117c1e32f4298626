"""What the server says of itself."""

from outrider import __version__

FINGERPRINT = f"outrider-{__version__}"
