"""The paper's road-map as a tool: sweep, choose, plan; and what the sweep itself has cost."""
