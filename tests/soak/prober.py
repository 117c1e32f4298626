"""Asks /health/live ten times a second, on a new connection each time: python prober.py HOST PORT FILE

Writes a line for each answer: the time, the status (0: none) and the seconds it took. A process of its own:
the clients of the soak must not delay the measurement.
"""

from __future__ import annotations

import http.client
import sys
import time

PERIOD_S = 0.1


def probe(host: str, port: int) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request("GET", "/health/live")
        return connection.getresponse().status
    except OSError:
        return 0
    except http.client.HTTPException:
        return 0
    finally:
        connection.close()


def main() -> None:
    host, port, path = sys.argv[1:]
    with open(path, "w", buffering=1) as file:
        while True:
            started_s = time.monotonic()
            status = probe(host, int(port))
            took_s = time.monotonic() - started_s
            file.write(f"{started_s:.3f} {status} {took_s:.4f}\n")
            time.sleep(max(0.0, PERIOD_S - took_s))


if __name__ == "__main__":
    main()
