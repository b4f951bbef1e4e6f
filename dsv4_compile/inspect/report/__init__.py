"""The HTML report of a dump folder."""
