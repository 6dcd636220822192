"""The package index: settings, requests, wheels and their metadata."""
