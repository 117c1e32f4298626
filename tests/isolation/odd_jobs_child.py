"""A child process for tests: its jobs crash, hang, and take memory and time."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from outrider.isolation.child import Handler, Reply, serve
from outrider.isolation.messages import Message


def new_handler(message: Message) -> Handler:
    if message.fields.get("is_broken"):
        raise RuntimeError("broken set-up")

    def handle(job: Message) -> Reply:
        match job.fields["do"]:
            case "reverse":
                return {"set_up": message.fields}, [bytes(reversed(job.data))]
            case "crash":
                ctypes.string_at(0)
            case "abort":
                os.abort()
            case "be_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "close_connection":
                os.close(0)
                time.sleep(10_000)
            case "take_memory":
                return {"taken": len(bytearray(job.fields["num_bytes"]))}, ()
            case "compute":
                while True:
                    pass
            case "wait":
                time.sleep(10_000)
            case "raise":
                raise KeyError("unexpected")
            case "many_bytes":
                return {}, [bytes(job.fields["num_bytes"])]
            case "environment":
                return {"names": sorted(os.environ)}, ()
        raise AssertionError

    return handle


if __name__ == "__main__":
    serve(new_handler)
