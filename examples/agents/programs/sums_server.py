"""An ordinary MCP server with one tool, on the `mcp` package."""

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


if __name__ == "__main__":
    server.run()
