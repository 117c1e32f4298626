"""An MCP server over stdio with odd tools: python odd_tools.py bad_schema|many|twins.

Its tool `look` reads a file. The schema of `look` does not compile, or there are 500 more tools, or a second
tool is called `look`.
"""

import json
import sys
from pathlib import Path

LOOK = {
    "name": "look",
    "description": "Looks at the greeting.",
    "inputSchema": {"type": "object", "properties": {"file": {"type": "string"}}, "required": ["file"]},
}
BAD = {"type": "object", "properties": {"file": {"type": "string", "pattern": "(unclosed"}}}
TOOLS = {
    "bad_schema": [LOOK | {"inputSchema": BAD}],
    "many": [*(LOOK | {"name": f"look_{i}"} for i in range(500)), LOOK],
    "twins": [LOOK, LOOK],
}


def result(method, params):
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "odd", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": TOOLS[sys.argv[1]]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": Path(params["arguments"]["file"]).read_text()}]}
    return {}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        answer = {"jsonrpc": "2.0", "id": request["id"]}
        answer["result"] = result(request["method"], request.get("params") or {})
        print(json.dumps(answer), flush=True)
