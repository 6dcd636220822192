"""The plan: layer order, image configuration, rendered files, size budgets. Pure."""
