"""LangChain's agent with two tools: python langchain_agent.py openai|anthropic URL MODEL TASK."""

import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replaces a text in a file."""
    file = Path(path)
    file.write_text(file.read_text().replace(old, new))
    return "replaced"


api, url, name, task = sys.argv[1:]
if api == "openai":
    model = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", streaming=True)
else:
    model = ChatAnthropic(model=name, base_url=url, api_key="none", streaming=True)
agent = create_agent(model, tools=[read_file, edit_file])
answer = agent.invoke({"messages": [{"role": "user", "content": task}]})
print(answer["messages"][-1].text)
