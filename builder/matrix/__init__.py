"""matrix.yaml to cells and tags; facts that no metadata has."""
