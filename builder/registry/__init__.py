"""The client of one repository in a registry. It uses neither the matrix nor a plan."""
