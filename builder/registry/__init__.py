"""The client of one repository in a registry. It knows no matrix and no plan."""
