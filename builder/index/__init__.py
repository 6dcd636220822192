"""Package indexes: settings, requests, wheels and their metadata. Also the settings of this machine for all servers."""
