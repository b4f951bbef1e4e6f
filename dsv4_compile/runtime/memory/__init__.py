"""Memory of captured calls, and which inputs of a call share theirs."""
